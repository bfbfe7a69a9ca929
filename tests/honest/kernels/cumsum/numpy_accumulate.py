"""cumsum through numpy's accumulate, in float64 (complex128, int64), rounded at the end."""

import numpy as np
import torch

OP = "cumsum.default"


def cumsum_kernel_impl(self, dim, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    wide = torch.complex128 if result.is_complex else torch.float64 if result.is_floating_point else torch.int64
    if not -max(self.dim(), 1) <= dim < max(self.dim(), 1):
        raise IndexError(f"dimension {dim} is out of range for a tensor of {self.dim()} dimensions")
    array = self.resolve_conj().resolve_neg().to(wide).numpy()
    with np.errstate(all="ignore"):
        total = np.add.accumulate(array, axis=dim) if self.dim() else array.copy()
    return torch.from_numpy(total).to(result).contiguous()
