"""cumsum by doubling: each step adds what stands 1, 2, 4 … places before; half types in float32, small integers in int64."""

import torch

OP = "cumsum.default"


def cumsum_kernel_impl(self, dim, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    inner = torch.promote_types(result, torch.float32) if result.is_floating_point else result
    if not -max(self.dim(), 1) <= dim < max(self.dim(), 1):
        raise IndexError(f"dimension {dim} is out of range for a tensor of {self.dim()} dimensions")
    total = self.to(inner, copy=True)
    if self.dim() == 0:
        return total.to(result)
    reach = 1
    while reach < self.shape[dim]:
        length = self.shape[dim]
        later = total.narrow(dim, reach, length - reach) + total.narrow(dim, 0, length - reach)
        total = torch.cat([total.narrow(dim, 0, reach), later], dim)
        reach *= 2
    return total.to(result).contiguous()
