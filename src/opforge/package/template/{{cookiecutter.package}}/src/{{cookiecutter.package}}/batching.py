"""Help for vmap rules."""

from typing import Any

from torch import Tensor


def to_front(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors with the dimension that vmap maps over in front; those without it are expanded."""
    moved: list[Tensor | None] = []
    dims = (*in_dims, *[None] * len(tensors))  # torch leaves out arguments that have their default
    for tensor, dim in zip(tensors, dims, strict=False):
        if tensor is None:
            moved.append(None)
        elif dim is None:
            moved.append(tensor.expand(info.batch_size, *tensor.shape))
        else:
            moved.append(tensor.movedim(dim, 0))
    return moved
