"""amax by a tournament of pairs; a NaN wins every match."""

import torch

OP = "amax.default"


def _better(left, right):
    if left.dtype == torch.bool:
        return left | right
    chosen = torch.where(left >= right, left, right)
    return torch.where(left != left, left, chosen) if left.is_floating_point() else chosen


def amax_kernel_impl(self, dim=(), keepdim=False):
    if self.is_complex():
        raise RuntimeError("complex numbers have no order")
    dims = [d % max(self.dim(), 1) for d in (dim or range(self.dim()))]
    kept = [d for d in range(self.dim()) if d not in dims]
    shape = [self.shape[d] for d in kept]
    field = self.permute(kept + [d for d in dims if d < self.dim()]).clone().reshape(*shape, -1 if self.numel() else 0)
    if field.shape[-1] == 0 and field.numel() == 0 and 0 not in shape:
        raise IndexError("amax of nothing has no value")
    while field.shape[-1] > 1:
        half = field.shape[-1] // 2
        field = torch.cat([_better(field[..., :half], field[..., half : 2 * half]), field[..., 2 * half :]], -1)
    final = [1 if d in dims else self.shape[d] for d in range(self.dim())] if keepdim else shape
    return field.reshape(final).contiguous() if field.numel() else self.new_empty(final)
