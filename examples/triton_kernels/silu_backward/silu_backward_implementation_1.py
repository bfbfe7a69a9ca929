"""silu_backward in Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024


@triton.jit
def _silu_backward(grad, source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, mask=inside).to(tl.float32)
    x = tl.load(source + at, mask=inside).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-x))
    slope = s * (1.0 + x * (1.0 - s))
    tl.store(target + at, g * slope, mask=inside)


def silu_backward_kernel_impl(grad_output, self):
    if self.dtype not in FLOATS or grad_output.dtype != self.dtype:
        raise NotImplementedError(
            f"silu_backward of {grad_output.dtype} and {self.dtype}: one of float16, bfloat16 and float32"
        )
    if grad_output.shape != self.shape:
        raise NotImplementedError("silu_backward of two shapes")
    grad, source = grad_output.contiguous(), self.contiguous()
    target = torch.empty_like(source)
    if count := source.numel():
        _silu_backward[(triton.cdiv(count, BLOCK),)](grad, source, target, count, BLOCK=BLOCK)
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-4, 4, 5, device=device)
    print(silu_backward_kernel_impl(torch.ones_like(x), x))
