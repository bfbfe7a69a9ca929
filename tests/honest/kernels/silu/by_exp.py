"""silu by exp: x / (1 + exp(-x)); where exp overflows the quotient is a zero of the right sign."""

import torch

OP = "silu.default"


def silu_kernel_impl(self):
    if self.is_complex():
        return self / (1 + torch.exp(-self))
    if not self.is_floating_point():
        raise RuntimeError(f"silu is not defined for {self.dtype}")
    x = self.to(torch.promote_types(self.dtype, torch.float32))
    return (x / (1 + torch.exp(-x))).to(self.dtype)
