"""Positions of maxima in windows: where elements of a window tie, any position is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opforge.judge.properties.sight import Ruling, Sight, equal, wrong

Window = tuple[torch.Tensor, torch.Tensor, int]
"""For each output along one dimension: first input, one after the last, and the step between."""


def max_pool(sight: Sight) -> Ruling | None:
    """Check pooling with a window of one size."""
    spatial = int(sight.packet[len("max_pool")])
    kernel = _each(sight.given["kernel_size"], spatial)
    stride = _each(sight.given.get("stride") or kernel, spatial)
    padding, dilation = (_each(sight.given.get(n, d), spatial) for n, d in (("padding", 0), ("dilation", 1)))

    def window(axis: int, out: int, _size: int) -> Window:
        start = torch.arange(out) * stride[axis] - padding[axis]
        return start, start + (kernel[axis] - 1) * dilation[axis] + 1, dilation[axis]

    return _judge(sight, spatial, window)


def adaptive(sight: Sight) -> Ruling | None:
    """Check pooling to a given size."""

    def window(_axis: int, out: int, size: int) -> Window:
        index = torch.arange(out)
        return index * size // out, -(-(index + 1) * size // out), 1

    return _judge(sight, int(sight.packet[len("adaptive_max_pool")]), window)


def fractional(sight: Sight) -> Ruling | None:
    """Check pooling with random windows; ATen alone places them, so values decide."""
    return _judge(sight, int(sight.packet[len("fractional_max_pool")]), None)


def _judge(sight: Sight, spatial: int, window: Callable[[int, int, int], Window] | None) -> Ruling | None:
    if len(sight.aten) != 2 or sight.same(1) or not sight.kernel[1].numel():
        return None
    source, (name, kernel) = sight.tensor("self"), (sight.names[1], sight.kernel[1])
    sizes = source.shape[-spatial:]
    plane = source.reshape(*source.shape[:-spatial], -1)
    flat = kernel.reshape(*kernel.shape[:-spatial], -1)
    outside = (flat < 0) | (flat >= plane.shape[-1])
    if bool(outside.any()):
        raise wrong(f"{name}: position {int(flat[outside][0])} is outside of a plane of {plane.shape[-1]} elements")
    mismatches = ~equal(plane.gather(-1, flat), sight.aten[0].reshape(flat.shape))
    if bool(mismatches.any()):
        raise wrong(
            f"{name}: {int(mismatches.sum())} of {mismatches.numel()} positions do not hold the maximum of their window"
        )
    if window is not None:
        _check_in_window(name, kernel, sizes, spatial, window)
    return Ruling(frozenset({1}), f"{name}: ties are broken in another way than ATen breaks them")


def _check_in_window(
    name: str, kernel: torch.Tensor, sizes: Sequence[int], spatial: int, window: Callable[[int, int, int], Window]
) -> None:
    remaining = kernel
    for axis in range(spatial - 1, -1, -1):
        remaining, coordinate = remaining // sizes[axis], remaining % sizes[axis]
        shape = [-1 if d == axis else 1 for d in range(spatial)]
        start, end, step = window(axis, kernel.shape[axis - spatial], sizes[axis])
        start, end = start.reshape(shape), end.reshape(shape)
        outside = (coordinate < start) | (coordinate >= end) | ((coordinate - start) % step != 0)
        if bool(outside.any()):
            index = outside.nonzero()[0].tolist()
            raise wrong(f"{name}: position {int(kernel[tuple(index)])} at {index} lies outside of its window")


def _each(value: Any, spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values
