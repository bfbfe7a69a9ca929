"""Kernel of add_scaled_. Each program works on a block of elements."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def add_scaled_kernel(x_ptr, y_ptr, alpha: tl.float64, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    if x_ptr.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    tl.store(x_ptr + at, (x + alpha * y).to(x_ptr.dtype.element_ty), mask=inside)
