"""tanh by expm1, which keeps the digits of small arguments and never overflows here."""

import torch

OP = "tanh.default"


def tanh_kernel_impl(self):
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    wide = self.to(torch.promote_types(dtype, torch.float32))
    less = torch.expm1(-2 * wide.abs())
    return torch.copysign(-less / (less + 2), wide).to(dtype)
