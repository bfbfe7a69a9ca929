"""mean.dim by a running mean: each slice moves it by its share; half types in float32. NaN of an empty mean as in ATen."""

import torch

OP = "mean.dim"


def mean__dim_kernel_impl(self, dim, keepdim=False, *, dtype=None):
    result = dtype or self.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(f"mean is for floating point or complex numbers, not {result}")
    inner = torch.complex128 if result.is_complex else torch.float64
    dims = [d % max(self.dim(), 1) for d in (dim or range(self.dim()))]
    kept = [d for d in range(self.dim()) if d not in dims]
    shape = [self.shape[d] for d in kept]
    terms = (
        self.to(inner).permute(kept + [d for d in dims if d < self.dim()]).flatten(len(kept))
        if self.dim()
        else self.to(inner).reshape(1)
    )
    mean = torch.full(shape, torch.nan, dtype=inner, device=self.device)
    for number, term in enumerate(terms.reshape(*shape, -1).unbind(-1) if terms.numel() else ()):
        mean = (
            term
            if number == 0
            else torch.where(
                torch.isfinite(mean) & torch.isfinite(term), mean + (term - mean) / (number + 1), mean + term
            )
        )
    final = [1 if d in dims else self.shape[d] for d in range(self.dim())] if keepdim else shape
    return mean.to(result, copy=True).reshape(final).contiguous()
