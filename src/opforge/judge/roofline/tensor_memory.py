"""Memory of tensors: the distinct bytes of one tensor, and of several together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory of a tensor's elements, from the first byte to the one after the last."""

    address_space: int
    """0 for real addresses; the storage of a fake or meta tensor, whose addresses mean nothing."""
    start: int
    end: int
    nbytes: int
    """Distinct bytes; fewer than the elements would take where some share memory."""


def memory_region(tensor: torch.Tensor) -> MemoryRegion | None:
    """Return a tensor's region; None if it has no elements or no strides."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    size = tensor.element_size()
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        space, start = storage_id(tensor), tensor.storage_offset() * size
    else:
        space, start = 0, tensor.data_ptr()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return MemoryRegion(space, start, start + (span + 1) * size, distinct_elements(tensor) * size)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage; views have that of their base."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # as torch identifies storages


def distinct_elements(tensor: torch.Tensor) -> int:
    """Return how many memory locations a tensor's elements have.

    This is a lower bound where dimensions overlap irregularly.
    """
    count, span, step = 1, 0, 0
    for stride, n in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        if n == 0:
            return 0
        if n == 1 or stride == 0:
            continue
        if stride > span:  # beyond all locations so far: each step adds as many again
            evenly = step == 0 or (span + step == stride)
            count, span, step = count * n, span + (n - 1) * stride, (step or stride) if evenly else -1
        elif step > 0 and stride % step == 0:  # onto evenly spaced locations: their row gets longer
            span += (n - 1) * stride
            count = span // step + 1
        else:
            span, step = span + (n - 1) * stride, -1
            count = max(count, n)
    return count


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes tensors have together; where they overlap, those of the largest."""
    regions = sorted(
        (r for t in tensors if (r := memory_region(t)) is not None), key=lambda r: (r.address_space, r.start)
    )
    total, largest, space, end = 0, 0, -1, -1
    for r in regions:
        if r.address_space != space or r.start >= end:
            total += largest
            largest, space, end = r.nbytes, r.address_space, r.end
        else:
            largest, end = max(largest, r.nbytes), max(end, r.end)
    return total + largest
