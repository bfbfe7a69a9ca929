"""addmm in Triton: a program for each block, summed in float32, with what is added."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _tiles(
    left,
    right,
    bias,
    target,
    rows,
    columns,
    inner,
    down_bias,
    along_bias,
    of_left,
    down_left,
    along_left,
    of_right,
    down_right,
    along_right,
    of_target,
    beta,
    alpha,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A block of the product; a third of the grid's axes is the matrix of a batch."""
    across = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    of = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, INNER)
    a = left + of * of_left + (row.to(tl.int64) * down_left)[:, None] + (k * along_left)[None, :]
    b = right + of * of_right + (k.to(tl.int64) * down_right)[:, None] + (column * along_right)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        left_here = (row < rows)[:, None] & (start + k < inner)[None, :]
        right_here = (start + k < inner)[:, None] & (column < columns)[None, :]
        x = tl.load(a, mask=left_here, other=0.0)
        y = tl.load(b, mask=right_here, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        a += INNER * along_left
        b += INNER * down_right
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    total = total * alpha
    if beta != 0.0:
        added = tl.load(
            bias + (row.to(tl.int64) * down_bias)[:, None] + (column * along_bias)[None, :], mask=inside, other=0.0
        )
        total += beta * added.to(tl.float32)
    place = of * of_target + (row.to(tl.int64) * columns)[:, None] + column[None, :]
    tl.store(target + place, total, mask=inside)


def _blocks(dtype, rows, columns):
    """Return how large a program's block is, and its warps and stages."""
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": 64, "INNER": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 32:
        return {"ROWS": 16, "COLUMNS": 64, "INNER": 128, "num_warps": 4, "num_stages": 4}
    if rows * columns <= 1024 * 1024:
        return {"ROWS": 64, "COLUMNS": 64, "INNER": 64, "num_warps": 4, "num_stages": 4}
    return {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}


def addmm_kernel_impl(self, mat1, mat2, *, beta=1, alpha=1):
    if mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        raise RuntimeError(f"addmm cannot multiply {list(mat1.shape)} by {list(mat2.shape)}")
    if not self.dtype == mat1.dtype == mat2.dtype or self.dtype not in FLOATS:
        raise NotImplementedError(
            f"addmm of {self.dtype}, {mat1.dtype} and {mat2.dtype}: one of float16, bfloat16 and float32"
        )
    (rows, inner), columns = mat1.shape, mat2.shape[1]
    bias = self.expand(rows, columns)
    target = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
    if target.numel():
        blocks = _blocks(self.dtype, rows, columns)
        grid = (triton.cdiv(rows, blocks["ROWS"]) * triton.cdiv(columns, blocks["COLUMNS"]), 1)
        _tiles[grid](
            mat1,
            mat2,
            bias,
            target,
            rows,
            columns,
            inner,
            *bias.stride(),
            0,
            *mat1.stride(),
            0,
            *mat2.stride(),
            0,
            float(beta),
            float(alpha),
            **blocks,
        )
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b, c = torch.randn(5, 7, device=device), torch.randn(7, 3, device=device), torch.randn(3, device=device)
    print((addmm_kernel_impl(c, a, b) - torch.addmm(c, a, b)).abs().max())
