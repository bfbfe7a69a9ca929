"""add in Triton, over broadcast and contiguous operands; numbers and alpha go along as tensors."""

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_sum(left, right, alpha, result, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(left + at, mask=inside)
    b = tl.load(right + at, mask=inside)
    tl.store(result + at, a + tl.load(alpha) * b, mask=inside)


def add_kernel_impl(self, other, *, alpha=1):
    dtype = torch.result_type(self, other)
    if dtype == torch.bool or dtype.is_complex:
        raise NotImplementedError(f"not in this kernel: {dtype}")
    if isinstance(alpha, float) and not dtype.is_floating_point:
        raise RuntimeError(f"alpha {alpha} does not fit a result of {dtype}")
    if not isinstance(other, torch.Tensor):
        other = torch.full((), other, dtype=dtype, device=self.device)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    left, right = (t.to(wide).contiguous() for t in torch.broadcast_tensors(self, other))
    result = torch.empty_like(left, memory_format=torch.contiguous_format)
    if result.numel():
        scale = torch.full((1,), alpha, dtype=wide, device=left.device)
        scaled_sum[(triton.cdiv(result.numel(), 1024),)](left, right, scale, result, result.numel(), BLOCK=1024)
    return result.to(dtype)
