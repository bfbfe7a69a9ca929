"""Kernel of rms_norm, autotuned. Each program works on a row."""

from typing import Any

import triton
import triton.language as tl

from .launch import autotune

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block in (256, 512, 1024, 2048, 4096, 8192)
    for warps in (1, 2, 4, 8, 16)
]


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Leave out blocks that are far too big for a row, and blocks with too little or too much work for a thread.

    Sizes are compared and not rounded, so that torch.compile with dynamic shapes keeps one result for a range of sizes.
    """
    size = named_args["size"]
    smallest = min(config.kwargs["BLOCK"] for config in configs)
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK"] == smallest or config.kwargs["BLOCK"] < 2 * size)
        and 4 <= config.kwargs["BLOCK"] // (32 * config.num_warps) <= 32
    ]


@autotune(CONFIGS, key=["size"], prune=prune)
@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, size, eps: tl.float64, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    squares = tl.zeros((BLOCK,), wide)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * size + at, mask=at < size, other=0.0).to(wide)
        squares += x * x
    scale = 1 / tl.sqrt((tl.sum(squares, 0) / size + eps).to(wide))
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        out = tl.load(x_ptr + row * size + at, mask=at < size, other=0.0).to(wide) * scale
        if WEIGHTED:
            out *= tl.load(weight_ptr + at, mask=at < size, other=0.0).to(wide)
        tl.store(out_ptr + row * size + at, out.to(out_ptr.dtype.element_ty), mask=at < size)
