"""add.Tensor in Triton over broadcast, contiguous operands; half types are widened before the launch and rounded after it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

OP = "add.Tensor"
BLOCK = 1024


@triton.jit
def _add(left, right, target, alpha, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(left + at, mask=inside)
    b = tl.load(right + at, mask=inside)
    scale = tl.load(alpha)
    tl.store(target + at, a + scale * b, mask=inside)


def add_kernel_impl(self, other, *, alpha=1):
    dtype = torch.result_type(self, other)
    if not isinstance(other, torch.Tensor) or dtype == torch.bool or dtype.is_complex:
        raise NotImplementedError(f"not in this kernel: {dtype}")
    if dtype == torch.bfloat16:
        raise NotImplementedError("bfloat16 is left to another kernel")
    if isinstance(alpha, float) and not dtype.is_floating_point:
        raise RuntimeError(f"alpha {alpha} does not fit a result of {dtype}")
    inner = torch.float32 if dtype == torch.float16 else dtype
    left, right = (t.to(inner).contiguous() for t in torch.broadcast_tensors(self, other))
    result = torch.empty_like(left, memory_format=torch.contiguous_format)
    if result.numel():
        scale = torch.tensor([alpha], dtype=inner, device=left.device)
        _add[(triton.cdiv(result.numel(), BLOCK),)](left, right, result, scale, result.numel(), BLOCK=BLOCK)
    return result.to(dtype)
