"""mm of integers by Strassen's seven products, exact in modular arithmetic; numbers with rounding take eight, in float64."""

import torch

OP = "mm.default"
LEAF = 4


def _plain(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[None, k]
    return total


def _strassen(a, b):
    n = len(a)
    if n <= LEAF:
        return _plain(a, b)
    h = n // 2
    a11, a12, a21, a22 = a[:h, :h], a[:h, h:], a[h:, :h], a[h:, h:]
    b11, b12, b21, b22 = b[:h, :h], b[:h, h:], b[h:, :h], b[h:, h:]
    m1 = _strassen(a11 + a22, b11 + b22)
    m2, m3 = _strassen(a21 + a22, b11), _strassen(a11, b12 - b22)
    m4, m5 = _strassen(a22, b21 - b11), _strassen(a11 + a12, b22)
    m6, m7 = _strassen(a21 - a11, b11 + b12), _strassen(a12 - a22, b21 + b22)
    top = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1)
    return torch.cat([top, torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)])


def mm_kernel_impl(self, mat2):
    if self.dim() != 2 or mat2.dim() != 2 or self.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"mm cannot multiply {list(self.shape)} by {list(mat2.shape)}")
    if self.dtype != mat2.dtype:
        raise RuntimeError(f"mm takes matrices of one dtype, not {self.dtype} and {mat2.dtype}")
    if self.is_complex():
        return _plain(self.to(torch.complex128), mat2.to(torch.complex128)).to(self.dtype)
    if self.is_floating_point():
        return _plain(self.double(), mat2.double()).to(self.dtype)
    side = max(*self.shape, mat2.shape[1], 1)
    side = 1 << (side - 1).bit_length()
    a, b = (torch.zeros(side, side, dtype=self.dtype) for _ in range(2))
    a[: self.shape[0], : self.shape[1]] = self
    b[: mat2.shape[0], : mat2.shape[1]] = mat2
    return _strassen(a, b)[: self.shape[0], : mat2.shape[1]].clone(memory_format=torch.contiguous_format)
