"""Kernel of row_moments. Each program works on a row: once for the mean, and once more for the distances from it."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def row_moments_kernel(x_ptr, mean_ptr, variance_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * size + at, mask=at < size, other=0.0).to(wide)
    mean = tl.sum(total, 0) / size
    squares = tl.zeros((BLOCK,), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * size + at, mask=at < size, other=0.0).to(wide)
        apart = tl.where(at < size, x - mean, 0.0)
        squares += apart * apart
    variance = tl.sum(squares, 0) / size
    tl.store(mean_ptr + row, mean.to(mean_ptr.dtype.element_ty))
    tl.store(variance_ptr + row, variance.to(variance_ptr.dtype.element_ty))
