"""_softmax in Triton, one program a row; half types are widened before the launch and rounded after it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

OP = "_softmax.default"


@triton.jit
def _rows(source, target, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(source + row * columns + at, mask=inside, other=-float("inf"))
    bad = tl.sum(tl.where(x != x, 1, 0), 0)
    powers = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
    share = powers / tl.sum(powers, 0)
    tl.store(target + row * columns + at, tl.where(bad > 0, float("nan"), share), mask=inside)


def _softmax_kernel_impl(self, dim, half_to_float):
    if half_to_float:
        raise RuntimeError("half to float conversion is for a GPU")
    if not self.is_floating_point():
        raise RuntimeError(f"softmax is not defined for {self.dtype}")
    wide = self.to(torch.promote_types(self.dtype, torch.float32)).reshape(self.shape or (1,))
    rows = wide.movedim(dim, -1).contiguous()
    result = torch.empty_like(rows)
    if rows.numel():
        columns = rows.shape[-1]
        _rows[(rows.numel() // columns,)](rows, result, columns, BLOCK=triton.next_power_of_2(columns))
    return result.movedim(-1, dim).reshape(self.shape).to(self.dtype).contiguous()
