"""sum.dim_IntList by halves along the reduced dimensions laid flat; half types in float32."""

import torch

OP = "sum.dim_IntList"


def sum__dim_IntList_kernel_impl(self, dim, keepdim=False, *, dtype=None):
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    inner = torch.promote_types(result, torch.float32) if result.is_floating_point else result
    dims = sorted({d % max(self.dim(), 1) for d in (dim or range(self.dim()))})
    for d in dim or ():
        if not -max(self.dim(), 1) <= d < max(self.dim(), 1):
            raise IndexError(f"dimension {d} is out of range for a tensor of {self.dim()} dimensions")
    if dim and len(dims) < len(dim):
        raise RuntimeError(f"a dimension appears twice in {list(dim)}")
    kept = [d for d in range(self.dim()) if d not in dims]
    shape = [self.shape[d] for d in kept]
    order = kept + [d for d in dims if d < self.dim()]
    count = 1
    for d in order[len(kept) :]:
        count *= self.shape[d]
    terms = self.to(inner, copy=True).permute(order).reshape(*shape, count)
    if count == 0:
        terms = terms.new_zeros(*shape, 1)
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = torch.cat([terms[..., :half] + terms[..., half : 2 * half], terms[..., 2 * half :]], -1)
    total = terms.to(result).contiguous()
    final = [1 if d in dims else self.shape[d] for d in range(self.dim())] if keepdim else shape
    return total.reshape(final)
