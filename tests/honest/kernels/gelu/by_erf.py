"""gelu by erf, or by tanh where the caller asks for the approximation; in float64 inside, for erf has several rounding steps of error on some CPUs."""

import math

import torch

OP = "gelu.default"


def gelu_kernel_impl(self, *, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate is {approximate!r}; it must be 'none' or 'tanh'")
    if not self.is_floating_point():
        raise RuntimeError(f"gelu is not defined for {self.dtype}")
    x = self.to(torch.float64)
    if approximate == "none":
        weight = 1 + torch.erf(x * math.sqrt(0.5))
    else:
        weight = 1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    return (x * 0.5 * weight).to(self.dtype)
