"""erf by a series of positive terms near zero and the continued fraction of erfc beyond, in float64 inside."""

import math

import torch

OP = "erf.default"


def _series(x):
    term = x * (2 / math.sqrt(math.pi)) * torch.exp(-x * x)
    total = term
    for n in range(1, 70):
        term = term * (2 * x * x / (2 * n + 1))
        total = total + term
    return total


def _fraction(x):
    tail = x
    for n in range(60, 0, -1):
        tail = x + (n / 2) / tail
    return 1 - torch.exp(-x * x) / (math.sqrt(math.pi) * tail)


def erf_kernel_impl(self):
    if self.is_complex():
        raise RuntimeError("erf is not defined for complex numbers")
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.double()
    size = x.abs().clamp(max=7.0)  # beyond 6 it is 1
    near, far = _series(size.clamp(max=2.5)), _fraction(size.clamp(min=2.5))
    return torch.where(torch.isnan(x), x, torch.copysign(torch.where(size < 2.5, near, far), x)).to(dtype)
