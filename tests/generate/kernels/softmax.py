"""softmax in Triton, one program for a row; half types are computed in float32."""

import torch
import triton
import triton.language as tl


@triton.jit
def rows_to_shares(source, result, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(source + row * columns + at, mask=inside, other=-float("inf"))
    nans = tl.sum(tl.where(x != x, 1, 0), 0)
    powers = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
    shares = powers / tl.sum(powers, 0)
    tl.store(result + row * columns + at, tl.where(nans > 0, float("nan"), shares), mask=inside)


def softmax_kernel_impl(self, dim, dtype=None):
    given = self if dtype is None else self.to(dtype)
    if not given.is_floating_point():
        raise RuntimeError(f"softmax is not defined for {given.dtype}")
    if not -max(self.dim(), 1) <= dim < max(self.dim(), 1):
        raise IndexError(f"dimension {dim} is out of range")
    wide = given.to(torch.promote_types(given.dtype, torch.float32)).reshape(self.shape or (1,))
    rows = wide.movedim(dim, -1).contiguous()
    result = torch.empty_like(rows)
    if rows.numel():
        columns = rows.shape[-1]
        rows_to_shares[(rows.numel() // columns,)](rows, result, columns, BLOCK=triton.next_power_of_2(columns))
    return result.movedim(-1, dim).reshape(self.shape).to(given.dtype).contiguous()
