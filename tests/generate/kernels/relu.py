"""relu in Triton; NaN is kept."""

import torch
import triton
import triton.language as tl


@triton.jit
def positive_part(source, result, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(source + at, mask=inside)
    tl.store(result + at, tl.where(x <= 0, tl.zeros_like(x), x), mask=inside)


def relu_kernel_impl(self):
    if self.dtype == torch.bool or self.is_complex():
        raise RuntimeError(f"relu is not defined for {self.dtype}")
    source = self.contiguous()
    result = torch.empty_like(source)
    if source.numel():
        positive_part[(triton.cdiv(source.numel(), 1024),)](source, result, source.numel(), BLOCK=1024)
    return result
