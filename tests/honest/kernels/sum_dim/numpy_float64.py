"""sum.dim_IntList through numpy in float64 (complex128, int64), rounded once."""

import numpy as np
import torch

OP = "sum.dim_IntList"


def sum__dim_IntList_kernel_impl(self, dim, keepdim=False, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    wide = torch.complex128 if result.is_complex else torch.float64 if result.is_floating_point else torch.int64
    axes = None if not dim else tuple(d % max(self.dim(), 1) for d in dim)
    array = self.resolve_conj().resolve_neg().to(wide).numpy()
    if self.dim() == 0:
        total = array.copy()
    else:
        total = np.sum(array, axis=axes, keepdims=keepdim)
    return torch.from_numpy(np.ascontiguousarray(total).reshape(total.shape)).to(result)
