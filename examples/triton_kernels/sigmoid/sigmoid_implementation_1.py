"""sigmoid in Triton, in float32."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024


@triton.jit
def _sigmoid(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside).to(tl.float32)
    y = 1.0 / (1.0 + tl.exp(-x))
    tl.store(target + at, y, mask=inside)


def sigmoid_kernel_impl(self):
    if self.dtype not in FLOATS:
        raise NotImplementedError(f"sigmoid of {self.dtype}: float16, bfloat16 and float32 only")
    source = self.contiguous()
    target = torch.empty_like(source)
    if count := source.numel():
        _sigmoid[(triton.cdiv(count, BLOCK),)](source, target, count, BLOCK=BLOCK)
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(sigmoid_kernel_impl(torch.linspace(-4, 4, 5, device=device)))
