"""How many places of a table indices choose: read from the indices, as timed calls keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

_MASK_DTYPES = (torch.bool, torch.uint8)


def has_contents(*tensors: torch.Tensor) -> bool:
    """Whether tensors have contents to read: those without memory have none."""
    return not any(isinstance(t, FakeTensor) or t.device.type == "meta" for t in tensors)


def chosen_elements(mask: torch.Tensor) -> int | None:
    """Return how many elements of a mask are true; None if it has no contents."""
    return int(torch.count_nonzero(mask)) if has_contents(mask) else None


def distinct_values(indices: torch.Tensor, size: int) -> int | None:
    """Return how many of ``size`` places indices choose, the negative ones from the end."""
    return int(torch.unique(indices % max(1, size)).numel()) if has_contents(indices) else None


def distinct_along(indices: torch.Tensor, dim: int, size: int) -> int | None:
    """Return how many places indices choose along a dimension; each line chooses its own."""
    if not has_contents(indices):
        return None
    if not indices.dim() or not indices.numel():
        return int(indices.numel())
    ordered = (indices % max(1, size)).movedim(dim, -1).sort(dim=-1).values
    return int(indices.numel() // indices.shape[dim]) + int(torch.count_nonzero(ordered.diff(dim=-1)))


def distinct_places(shape: Sequence[int], indices: Sequence[torch.Tensor | None]) -> tuple[int, int, int] | None:
    """Return how many places of a tensor of a shape indices choose together.

    They are counted once, and as often as they are chosen; the third number is that of the elements at each
    place. Masks choose where they are true. None without contents.
    """
    numbers: list[torch.Tensor] = []
    sizes: list[int] = []
    dim = 0
    for index in indices:
        covered = index.dim() if index is not None and index.dtype in _MASK_DTYPES else 1
        if index is not None:
            if not has_contents(index):
                return None
            numbers += index.nonzero(as_tuple=True) if index.dtype in _MASK_DTYPES else [index]
            sizes += shape[dim : dim + covered]
        dim += covered
    place = torch.zeros((), dtype=torch.int64)
    for number, size in zip(numbers, sizes, strict=True):
        place = place.to(number.device) * size + number.to(torch.int64) % max(1, size)
    return torch.unique(place).numel(), place.numel(), math.prod(shape) // max(1, math.prod(sizes))
