"""_fft_c2c by halving while the length is even, and by the definition for what is left, in complex128 inside."""

import cmath

import torch

OP = "_fft_c2c.default"


def _roots(n, sign):
    return torch.tensor([cmath.exp(sign * 2j * cmath.pi * k / n) for k in range(n)], dtype=torch.complex128)


def _fft(x, sign):
    n = x.shape[-1]
    if n % 2 or n < 2:
        roots = _roots(n, sign)
        places = torch.arange(n)
        return (x.unsqueeze(-2) * roots[(places[:, None] * places[None, :]) % n]).sum(-1)
    even, odd = _fft(x[..., ::2], sign), _fft(x[..., 1::2], sign)
    turned = odd * _roots(n, sign)[: n // 2]
    return torch.cat([even + turned, even - turned], -1)


def _fft_c2c_kernel_impl(self, dim, normalization, forward):
    if not self.is_complex():
        raise RuntimeError(f"_fft_c2c takes complex numbers, not {self.dtype}")
    if not self.numel():
        return torch.empty(self.shape, dtype=self.dtype)
    result, count = self.to(torch.complex128), 1
    for d in dim:
        result = _fft(result.movedim(d, -1), -1 if forward else 1).movedim(-1, d)
        count *= self.shape[d]
    scale = {0: 1.0, 1: count**-0.5, 2: 1 / count}[normalization]
    return (result * scale).to(self.dtype).contiguous()
