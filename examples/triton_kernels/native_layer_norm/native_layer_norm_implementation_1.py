"""native_layer_norm in Triton: a program for each row, two passes over what it holds, in float32."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 65536


@triton.jit
def _rows(
    source,
    weight,
    bias,
    target,
    means,
    rstds,
    count,
    eps,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + row * count + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / count
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / count + eps)
    y = centred * rstd
    if WEIGHT:
        y = y * tl.load(weight + at, mask=inside).to(tl.float32)
    if BIAS:
        y = y + tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(target + row * count + at, y, mask=inside)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)


def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    outer = input.dim() - len(normalized_shape)
    if outer < 0 or not normalized_shape or list(input.shape[outer:]) != list(normalized_shape):
        raise RuntimeError(f"normalized_shape {list(normalized_shape)} does not fit input of shape {list(input.shape)}")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and list(given.shape) != list(normalized_shape):
            raise RuntimeError(f"{name} has shape {list(given.shape)}, not {list(normalized_shape)}")
    count = input[(0,) * outer].numel() if input.numel() else 0
    if input.dtype not in FLOATS or not 0 < count <= LONGEST:
        raise NotImplementedError(
            f"native_layer_norm of {input.dtype} in rows of {count}: float16, bfloat16 and float32, 1 to {LONGEST}"
        )
    given = [w for w in (weight, bias) if w is not None]
    if any(w.dtype != input.dtype for w in given):
        raise NotImplementedError("native_layer_norm of two dtypes")
    source = input.contiguous()
    target = torch.empty_like(source)
    wide = torch.float32 if input.is_cuda else input.dtype
    means = torch.empty(list(input.shape[:outer]) + [1] * len(normalized_shape), dtype=wide, device=input.device)
    rstds = torch.empty_like(means)
    weight, bias = (None if w is None else w.contiguous() for w in (weight, bias))
    block = triton.next_power_of_2(count)
    _rows[(means.numel(),)](
        source,
        weight,
        bias,
        target,
        means,
        rstds,
        count,
        eps,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return target, means, rstds


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(native_layer_norm_kernel_impl(torch.randn(2, 8, device=device), [8], None, None, 1e-5)[0])
