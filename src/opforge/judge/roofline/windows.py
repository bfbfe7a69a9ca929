"""Windows that slide over dimensions, as in convolutions and pooling: which elements they touch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WindowUse:
    """What windows use of elements and of their own taps. A tap on padding is not used."""

    elements: int
    """Elements under at least one tap of a window."""
    taps: int
    """Taps that are above an element in at least one window."""
    windows: int
    pairs: int
    """Pairs of a window and a tap that is above an element."""
    element_share: float
    tap_share: float
    window_share: float
    """Share of windows with at least one tap above an element."""


def window_use(
    lengths: Sequence[int],
    windows: Sequence[int],
    taps: Sequence[int],
    steps: Sequence[int],
    paddings: Sequence[int],
    spacings: Sequence[int],
) -> WindowUse:
    """Return what windows use, from the numbers of each dimension.

    They are its length, the number of windows and of their taps, the step between windows, the padding before the
    first element, and the spacing of taps.
    """
    uses = [_use_along(*numbers) for numbers in zip(lengths, windows, taps, steps, paddings, spacings, strict=True)]
    columns = zip(*uses, strict=True) if uses else [(1,)] * 4
    elements, used_taps, used_windows, pairs = map(math.prod, columns)
    return WindowUse(
        elements,
        used_taps,
        math.prod(windows),
        pairs,
        elements / max(1, math.prod(lengths)),
        used_taps / max(1, math.prod(taps)),
        used_windows / max(1, math.prod(windows)),
    )


def _use_along(length: int, windows: int, taps: int, step: int, padding: int, spacing: int) -> tuple[int, ...]:
    """Return elements, taps, windows and pairs of one dimension."""
    touched, used, used_taps, pairs = bytearray(length), bytearray(windows), 0, 0
    for tap in range(taps):
        offset = tap * spacing - padding
        first = max(0, -(offset // step))
        count = min(windows - 1, (length - 1 - offset) // step) - first + 1
        if count > 0:
            start = offset + first * step
            touched[start : start + (count - 1) * step + 1 : step] = b"\1" * count
            used[first : first + count] = b"\1" * count
            used_taps += 1
            pairs += count
    return touched.count(1), used_taps, used.count(1), pairs


def per_dimension(value: Any, dimensions: int, default: int) -> list[int]:
    """Return an argument that is one number for all dimensions, or one for each."""
    numbers = list(value) if isinstance(value, Iterable) else [value]
    numbers = [n for n in numbers if isinstance(n, int)]
    if not numbers:
        return [default] * dimensions
    return numbers * dimensions if len(numbers) == 1 else numbers
