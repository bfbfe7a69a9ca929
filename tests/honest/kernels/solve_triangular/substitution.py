"""linalg_solve_triangular by substitution, row after row; batches broadcast."""

import torch

OP = "linalg_solve_triangular.default"


def linalg_solve_triangular_kernel_impl(self, B, *, upper, left=True, unitriangular=False):
    if not left:
        turned = linalg_solve_triangular_kernel_impl(self.mT, B.mT, upper=not upper, unitriangular=unitriangular)
        return turned.mT.contiguous()
    batch = torch.broadcast_shapes(self.shape[:-2], B.shape[:-2])
    wide = torch.complex128 if self.is_complex() else torch.float64
    a = self.to(wide).expand(*batch, *self.shape[-2:])
    x = B.to(wide).expand(*batch, *B.shape[-2:]).clone(memory_format=torch.contiguous_format)
    n = self.shape[-1]
    for i in reversed(range(n)) if upper else range(n):
        done = slice(i + 1, n) if upper else slice(0, i)
        x[..., i, :] -= (a[..., i, done].unsqueeze(-1) * x[..., done, :]).sum(-2)
        if not unitriangular:
            x[..., i, :] /= a[..., i, i].unsqueeze(-1)
    return x.to(self.dtype)
