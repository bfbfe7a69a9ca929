"""var.correction in two passes: the mean first, then the squares of the distances from it; half types in float32."""

import torch

OP = "var.correction"


def var__correction_kernel_impl(self, dim=None, *, correction=None, keepdim=False):
    if not (self.is_floating_point() or self.is_complex()):
        raise RuntimeError(f"var is for floating point and complex numbers, not {self.dtype}")
    if self.is_complex():
        real, imaginary = torch.view_as_real(self.resolve_conj()).unbind(-1)
        parts = [var__correction_kernel_impl(p, dim, correction=correction, keepdim=keepdim) for p in (real, imaginary)]
        return parts[0] + parts[1]
    wide = self.to(torch.promote_types(self.dtype, torch.float32))
    dims = [d % max(self.dim(), 1) for d in (dim or range(self.dim()))] if self.dim() else []
    count = 1
    for d in dims:
        count *= self.shape[d]
    mean = wide.sum(dims, keepdim=True) / count if dims else wide
    squares = (wide - mean).square()
    total = squares.sum(dims, keepdim=keepdim) if dims else squares
    freedom = max(0.0, count - (1 if correction is None else correction))
    return (total / freedom).to(self.dtype)
