"""gelu in Triton, by the error function or by tanh (which is a sigmoid, and loses nothing where it is near -1)."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024


@triton.jit
def _gelu(source, target, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside).to(tl.float32)
    if TANH:  # a branch that is chosen when compiled
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(target + at, y, mask=inside)


def gelu_kernel_impl(self, *, approximate="none"):
    if self.dtype not in FLOATS:
        raise NotImplementedError(f"gelu of {self.dtype}: float16, bfloat16 and float32 only")
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate is none or tanh, not {approximate!r}")
    source = self.contiguous()
    target = torch.empty_like(source)
    if count := source.numel():
        _gelu[(triton.cdiv(count, BLOCK),)](source, target, count, TANH=approximate == "tanh", BLOCK=BLOCK)
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(gelu_kernel_impl(torch.linspace(-4, 4, 5, device=device)))
