"""exp by a table of the powers 2^(j/32) and a short polynomial for the rest, in float64 inside."""

import math

import torch

OP = "exp.default"
STEPS = 32
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01 / STEPS, 1.90821492927058770002e-10 / STEPS
TABLE = [2.0 ** (j / STEPS) for j in range(STEPS)]


def exp_kernel_impl(self):
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.to(torch.float64)
    inside = x.nan_to_num(nan=0.0, posinf=800.0, neginf=-800.0).clamp(-800.0, 800.0)
    n = torch.round(inside * (STEPS / math.log(2)))
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    n = n.long()
    small = r * (1 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720))))))
    power = torch.tensor(TABLE, dtype=torch.float64)[n.remainder(STEPS)]
    scale = torch.div(n, STEPS, rounding_mode="floor")
    first = torch.div(scale, 2, rounding_mode="floor")
    value = torch.ldexp(torch.ldexp(power + power * small, first), scale - first)
    return torch.where(x != x, x, value).to(dtype)
