"""Kernel of rms_norm, autotuned. Each program works on some rows: once for their scale, and once more for the result."""

from typing import Any

import triton
import triton.language as tl

from .launch import autotune

TILES = [(16, 64), (4, 256), (1, 1024), (1, 2048), (1, 4096), (1, 8192)]
"""How many rows a program takes, and how much of them at a time."""

CONFIGS = [
    triton.Config({"ROWS": rows, "BLOCK": block}, num_warps=warps)
    for rows, block in TILES
    for warps in (1, 2, 4, 8, 16)
]


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Leave out what cannot be fast: blocks far longer than a row, several rows that do not fit, too little or too much for a thread.

    Sizes are compared and not rounded, so that torch.compile with dynamic shapes keeps one result for a range of sizes.
    """
    size = named_args["size"]
    return [config for config in configs if _fits(size, **config.kwargs) and 4 <= _each(config) <= 32]


def _fits(size: int, ROWS: int, BLOCK: int) -> bool:
    return (ROWS == 1 or size <= BLOCK) and (BLOCK == TILES[0][1] or BLOCK < 4 * size)


def _each(config: triton.Config) -> int:
    """Return how many elements a thread has at a time."""
    return int(config.kwargs["ROWS"] * config.kwargs["BLOCK"] // (32 * config.num_warps))


@autotune(CONFIGS, key=["size"], prune=prune)
@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    size,
    eps: tl.float64,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    squares = tl.zeros((ROWS, BLOCK), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + row * size + at, mask=(row < rows) & (at < size), other=0.0).to(wide)
        squares += x * x
    scale = 1 / tl.sqrt((tl.sum(squares, 1) / size + eps).to(wide))
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (at < size)
        out = tl.load(x_ptr + row * size + at, mask=inside, other=0.0).to(wide) * scale[:, None]
        if WEIGHTED:
            out *= tl.load(weight_ptr + at, mask=at < size, other=0.0).to(wide)
        tl.store(out_ptr + row * size + at, out.to(out_ptr.dtype.element_ty), mask=inside)
