"""var.correction by Welford's recurrence, in float64 inside."""

import torch

OP = "var.correction"


def _real(x, count_dims, correction, keep):
    count, mean, squares = (
        0,
        torch.zeros(x.shape[:-1], dtype=torch.float64),
        torch.zeros(x.shape[:-1], dtype=torch.float64),
    )
    for term in x.unbind(-1):
        count += 1
        step = term - mean
        mean = mean + step / count
        squares = squares + step * (term - mean)
    freedom = max(0.0, count - correction)
    return (squares / freedom if freedom else torch.where(squares > 0, torch.inf, torch.nan) + squares * 0).reshape(
        keep
    )


def var__correction_kernel_impl(self, dim=None, *, correction=None, keepdim=False):
    if not (self.is_floating_point() or self.is_complex()):
        raise RuntimeError(f"var is for floating point and complex numbers, not {self.dtype}")
    correction = 1 if correction is None else correction
    dims = [d % max(self.dim(), 1) for d in (dim or range(self.dim()))]
    kept = [d for d in range(self.dim()) if d not in dims]
    shape = [self.shape[d] for d in kept]
    final = [1 if d in dims else self.shape[d] for d in range(self.dim())] if keepdim else shape
    order = kept + [d for d in dims if d < self.dim()]
    count = 1
    for d in order[len(kept) :]:
        count *= self.shape[d]
    parts = torch.view_as_real(self.resolve_conj()).unbind(-1) if self.is_complex() else [self]
    total = sum(_real(p.double().permute(order).reshape(*shape, count), dims, correction, final) for p in parts)
    return total.to(parts[0].dtype)
