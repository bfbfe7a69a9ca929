"""gelu_backward in Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024


@triton.jit
def _gelu_backward(grad, source, target, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, mask=inside).to(tl.float32)
    x = tl.load(source + at, mask=inside).to(tl.float32)
    if TANH:
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    tl.store(target + at, g * slope, mask=inside)


def gelu_backward_kernel_impl(grad_output, self, *, approximate="none"):
    if self.dtype not in FLOATS or grad_output.dtype != self.dtype:
        raise NotImplementedError(
            f"gelu_backward of {grad_output.dtype} and {self.dtype}: one of float16, bfloat16 and float32"
        )
    if grad_output.shape != self.shape:
        raise NotImplementedError("gelu_backward of two shapes")
    grad, source = grad_output.contiguous(), self.contiguous()
    target = torch.empty_like(source)
    if count := source.numel():
        _gelu_backward[(triton.cdiv(count, BLOCK),)](
            grad, source, target, count, TANH=approximate == "tanh", BLOCK=BLOCK
        )
    return target


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-4, 4, 5, device=device)
    print(gelu_backward_kernel_impl(torch.ones_like(x), x))
