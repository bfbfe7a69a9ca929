"""sigmoid in Triton. bfloat16 is loaded as int16 and widened by a shift, because Triton's interpreter gets its arithmetic wrong."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

OP = "sigmoid.default"
BLOCK = 1024


@triton.jit
def _sigmoid(source, target, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside, other=0)
    if BITS:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    small = tl.exp(-tl.abs(x))
    tl.store(target + at, tl.where(x < 0, small, 1.0) / (1.0 + small), mask=inside)


def sigmoid_kernel_impl(self):
    if self.is_complex():
        return torch.reciprocal(1 + torch.exp(-self))
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    bits = dtype == torch.bfloat16
    source = (
        self.contiguous().view(torch.int16) if bits else self.contiguous().to(torch.promote_types(dtype, torch.float32))
    )
    result = torch.empty(self.shape, dtype=torch.float32 if bits else source.dtype, device=self.device)
    if source.numel():
        _sigmoid[(triton.cdiv(source.numel(), BLOCK),)](source, result, source.numel(), BITS=bits, BLOCK=BLOCK)
    return result.to(dtype)
