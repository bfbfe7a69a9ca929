"""gelu by erfc, in which nothing cancels, or by tanh where the caller asks for the approximation; half types in float32."""

import math

import torch

OP = "gelu.default"


def gelu_kernel_impl(self, *, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    if not self.is_floating_point():
        raise RuntimeError(f"gelu is not defined for {self.dtype}")
    x = self.to(torch.promote_types(self.dtype, torch.float32))
    if approximate == "none":
        weight = torch.erfc(-x * math.sqrt(0.5))
    else:
        weight = 1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    return (x * 0.5 * weight).to(self.dtype)
