"""sigmoid with a reciprocal by Newton's iteration, so that there is no division; half types in float32."""

import torch

OP = "sigmoid.default"


def sigmoid_kernel_impl(self):
    if self.is_complex():
        return torch.reciprocal(1 + torch.exp(-self))
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.to(torch.promote_types(dtype, torch.float32))
    small = torch.exp(-x.abs())
    divisor = 1 + small  # in [1, 2]
    guess = 24 / 17 - 8 / 17 * divisor
    for _ in range(6):
        guess = guess + guess * (1 - divisor * guess)
    return torch.where(x < 0, small * guess, guess).to(dtype)
