"""Positions of maxima in windows: where elements of a window tie, any position is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opforge.judge.compare.properties.property_check import Accepted, Results, equal_or_both_nan, wrong_result

Window = tuple[torch.Tensor, torch.Tensor, int]
"""For each output along one dimension: first input, one after the last, and the step between."""


def max_pool(call: Results) -> Accepted | None:
    """Check pooling with a window of one size."""
    spatial = int(call.packet[len("max_pool")])
    kernel = _each(call.arguments["kernel_size"], spatial)
    stride = _each(call.arguments.get("stride") or kernel, spatial)
    padding, dilation = (_each(call.arguments.get(n, d), spatial) for n, d in (("padding", 0), ("dilation", 1)))

    def window(axis: int, out: int, _size: int) -> Window:
        start = torch.arange(out) * stride[axis] - padding[axis]
        return start, start + (kernel[axis] - 1) * dilation[axis] + 1, dilation[axis]

    return _check_positions(call, spatial, window)


def adaptive_max_pool(call: Results) -> Accepted | None:
    """Check pooling to a given size."""

    def window(_axis: int, out: int, size: int) -> Window:
        index = torch.arange(out)
        return index * size // out, -(-(index + 1) * size // out), 1

    return _check_positions(call, int(call.packet[len("adaptive_max_pool")]), window)


def fractional_max_pool(call: Results) -> Accepted | None:
    """Check pooling with random windows; ATen alone places them, so values decide."""
    return _check_positions(call, int(call.packet[len("fractional_max_pool")]), None)


def _check_positions(call: Results, spatial: int, window: Callable[[int, int, int], Window] | None) -> Accepted | None:
    if len(call.aten) != 2 or call.same_bits(1) or not call.kernel[1].numel():
        return None
    source, (name, kernel) = call.tensor_argument("self"), (call.result_names[1], call.kernel[1])
    sizes = source.shape[-spatial:]
    plane = source.reshape(*source.shape[:-spatial], -1)
    flat = kernel.reshape(*kernel.shape[:-spatial], -1)
    outside = (flat < 0) | (flat >= plane.shape[-1])
    if bool(outside.any()):
        raise wrong_result(f"{name}: position {int(flat[outside][0])} is outside a plane of {plane.shape[-1]} elements")
    mismatches = ~equal_or_both_nan(plane.gather(-1, flat), call.aten[0].reshape(flat.shape))
    if bool(mismatches.any()):
        raise wrong_result(
            f"{name}: {int(mismatches.sum())} of {mismatches.numel()} positions do not hold the maximum of their window"
        )
    if window is not None:
        _check_in_window(name, kernel, sizes, spatial, window)
    return Accepted(frozenset({1}), f"{name}: ties are broken differently from ATen")


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
            raise wrong_result(f"{name}: position {int(kernel[tuple(index)])} at {index} is outside its window")


def _each(value: Any, spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values
