"""add in Triton: two tensors, or a tensor and a number."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024


@triton.jit
def _same(left, right, target, count, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(left + at, mask=inside).to(tl.float32)
    y = tl.load(right + at, mask=inside).to(tl.float32)
    tl.store(target + at, x + alpha * y, mask=inside)


@triton.jit
def _number(left, number, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(left + at, mask=inside).to(tl.float32)
    tl.store(target + at, x + number, mask=inside)


def add_kernel_impl(self, other, *, alpha=1):
    if not torch.is_tensor(other):
        other = torch.tensor(other)
    dtype = torch.result_type(self, other)
    if dtype not in FLOATS or self.dtype != dtype or not self.dim():
        raise NotImplementedError(
            f"add of {self.dtype} and {other.dtype}: one of float16, bfloat16 and float32, and no number first"
        )
    if not other.dim() and other.device.type == "cpu":
        left = self.contiguous()
        target = torch.empty_like(left)
        if count := left.numel():
            _number[(triton.cdiv(count, BLOCK),)](left, float(other) * alpha, target, count, BLOCK=BLOCK)
        return target
    if other.dtype != dtype:
        raise NotImplementedError(f"add of {self.dtype} and {other.dtype}: one dtype only")
    left, right = torch.broadcast_tensors(self, other)
    left, right = left.contiguous(), right.contiguous()
    target = torch.empty_like(left)
    if count := left.numel():
        _same[(triton.cdiv(count, BLOCK),)](left, right, target, count, float(alpha), BLOCK=BLOCK)
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(add_kernel_impl(torch.linspace(-4, 4, 5, device=device), torch.ones(1, device=device)))
