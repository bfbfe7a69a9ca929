"""silu in Triton: x * sigmoid(x). Compiled on a GPU; on a CPU it runs in Triton's interpreter, with small shapes in mind.

The interpreter gets bfloat16 arithmetic wrong, so half types are widened before the launch and rounded after it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside, other=0.0)
    tl.store(target + at, x / (1.0 + tl.exp(-x)), mask=inside)


def silu_kernel_impl(self):
    if self.is_complex():
        return self / (1 + torch.exp(-self))
    if not self.is_floating_point():
        raise RuntimeError(f"silu is not defined for {self.dtype}")
    flat = self.to(torch.promote_types(self.dtype, torch.float32)).contiguous()
    result = torch.empty_like(flat)
    if flat.numel():
        _silu[(triton.cdiv(flat.numel(), BLOCK),)](flat, result, flat.numel(), BLOCK=BLOCK)
    return torch.empty_like(self).copy_(result)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(silu_kernel_impl(torch.linspace(-4, 4, 5, device=device)))
