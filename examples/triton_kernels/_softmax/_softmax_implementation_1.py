"""_softmax in Triton: a program for each row, in float32."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 65536


@triton.jit
def _rows(source, target, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, BLOCK)
    x = tl.load(source + row + at, mask=at < count, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(target + row + at, e / tl.sum(e, axis=0), mask=at < count)


def _softmax_kernel_impl(self, dim, half_to_float):
    if self.dtype not in FLOATS or half_to_float or not self.dim():
        raise NotImplementedError(
            "_softmax: float16, bfloat16 and float32 of one dimension or more, into the same dtype"
        )
    if not -self.dim() <= dim < self.dim():
        raise IndexError(f"dim {dim} of a tensor of {self.dim()} dimensions")
    if self.shape[dim] > LONGEST:
        raise NotImplementedError(f"_softmax of rows of {self.shape[dim]}: {LONGEST} at most")
    source = self.movedim(dim, -1).contiguous()
    target = torch.empty_like(source)
    if source.numel():
        count = source.shape[-1]
        block = triton.next_power_of_2(count)
        warps = min(max(block // 512, 1), 16)
        _rows[(source.numel() // count,)](source, target, count, BLOCK=block, num_warps=warps)
    return target if dim in (-1, self.dim() - 1) else target.movedim(-1, dim).contiguous()


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(_softmax_kernel_impl(torch.linspace(-4, 4, 5, device=device), 0, False))
