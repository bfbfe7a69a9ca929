"""exp by range reduction with a two-part ln 2 and a polynomial in Horner's form, in float64 inside."""

import math

import torch

OP = "exp.default"
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
COEFFICIENTS = [1 / math.factorial(n) for n in range(14)]


def exp_kernel_impl(self):
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.double()
    inside = torch.clamp(torch.nan_to_num(x, nan=0.0), -800.0, 800.0)
    n = torch.round(inside * (1 / math.log(2)))
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    value = torch.full_like(r, COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        value = value * r + coefficient
    half = torch.floor(n / 2)  # in two steps: one power alone would overflow, or lose a denormal result
    value = torch.ldexp(torch.ldexp(value, half.int()), (n - half).int())
    return torch.where(torch.isnan(x), x, value).to(dtype)
