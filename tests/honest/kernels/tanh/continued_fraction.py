"""tanh by Lambert's continued fraction near zero and by exp elsewhere, in float64 inside."""

import torch

OP = "tanh.default"


def tanh_kernel_impl(self):
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.double()
    size = x.abs()
    near = size.clamp(max=0.75)
    tail = torch.full_like(near, 27.0)
    for odd in range(25, 0, -2):
        tail = odd + near * near / tail
    less = torch.exp(-2 * size)
    value = torch.where(size < 0.75, near / tail, (1 - less) / (1 + less))
    return torch.where(torch.isnan(x), x, torch.copysign(value, x)).to(dtype)
