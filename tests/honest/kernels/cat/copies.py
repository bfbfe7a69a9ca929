"""cat by copying each piece into its place; any dtype that can be copied, eight-bit floats too."""

import torch

OP = "cat.default"


def cat_kernel_impl(tensors, dim=0):
    if not tensors:
        raise RuntimeError("cat needs at least one tensor")
    pieces = [t for t in tensors if tuple(t.shape) != (0,)]
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    if any(t.dim() == 0 for t in tensors):
        raise RuntimeError("tensors without dimensions cannot be joined")
    if not pieces:
        return torch.empty(0, dtype=dtype)
    first = pieces[0]
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"dimension {dim} is out of range for {first.dim()} dimensions")
    dim %= first.dim()
    for t in pieces[1:]:
        if t.dim() != first.dim() or any(
            a != b for d, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if d != dim
        ):
            raise RuntimeError(f"{list(t.shape)} cannot be joined to {list(first.shape)} along dimension {dim}")
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in pieces)
    result, at = torch.empty(shape, dtype=dtype), 0
    for t in pieces:
        result.narrow(dim, at, t.shape[dim]).copy_(t)
        at += t.shape[dim]
    return result
