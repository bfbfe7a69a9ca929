"""Kernel of row_moments. Each program works on some rows: once for the mean, and once more for the distances from it."""

import triton
import triton.language as tl


def tile(size: int) -> tuple[int, int]:
    """Return how many rows a program takes, and how much of them at a time.

    Sizes are compared and not rounded, so that torch.compile with dynamic shapes keeps one result for a range of sizes.
    """
    if size <= 64:
        return 16, 64
    return (4, 256) if size <= 256 else (1, 1024)


@triton.jit
def row_moments_kernel(  # type: ignore[no-untyped-def]
    x_ptr, mean_ptr, variance_ptr, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start_ptr = x_ptr + row[:, None] * size
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((ROWS, BLOCK), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < rows) & (at < size)
        total += tl.load(start_ptr + at, mask=inside, other=0.0).to(wide)
    mean = tl.sum(total, 1) / size
    squares = tl.zeros((ROWS, BLOCK), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < rows) & (at < size)
        x = tl.load(start_ptr + at, mask=inside, other=0.0).to(wide)
        apart = tl.where(inside, x - mean[:, None], 0.0)
        squares += apart * apart
    variance = tl.sum(squares, 1) / size
    tl.store(mean_ptr + row, mean.to(mean_ptr.dtype.element_ty), mask=row < rows)
    tl.store(variance_ptr + row, variance.to(variance_ptr.dtype.element_ty), mask=row < rows)
