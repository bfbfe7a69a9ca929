"""rsqrt from the well-known guess by bits, then Newton's iteration, in float64 inside; zero, infinity and denormals apart."""

import torch

OP = "rsqrt.default"


def rsqrt_kernel_impl(self):
    if self.is_complex():
        raise RuntimeError("this rsqrt is for real numbers")
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    x = self.double()
    small = x < 1e-300
    scaled = torch.where(small, x * 2.0**108, x)
    usual = (scaled > 0) & ~torch.isinf(scaled)
    base = torch.where(usual, scaled, 1.0)
    guess = (0x5FE6EB50C7B537A9 - (base.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(5):
        guess = guess * (1.5 - 0.5 * base * guess * guess)
    value = torch.where(small, guess * 2.0**54, guess)
    rest = torch.where(x == 0, torch.copysign(torch.full_like(x, torch.inf), x), torch.where(x > 0, 0.0, torch.nan))
    return torch.where(usual, value, rest).to(dtype)
