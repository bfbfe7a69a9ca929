"""How the elements of a tensor lie in memory, in words. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CONTIGUOUS, CHANNELS_LAST, EXPANDED, TRANSPOSED, STRIDED, OFFSET, EMPTY = (
    "contiguous", "channels_last", "expanded", "transposed", "strided", "offset", "empty",
)  # fmt: skip


SHAPES_DIFFER = "shapes differ"
"""Beside layouts: the tensors of a call are not all of one shape, as where one is broadcast."""


def layout(shape: Sequence[int], stride: Sequence[int]) -> str:
    """Return the layout of a shape and strides."""
    if 0 in shape:
        return EMPTY
    sizes = [(step, size) for size, step in zip(shape, stride, strict=True) if size > 1]
    if _dense(reversed(sizes)):
        return CONTIGUOUS
    if any(step == 0 for step, _ in sizes):
        return EXPANDED
    if len(shape) in (4, 5) and _dense([(stride[i], shape[i]) for i in (1, *range(len(shape) - 1, 1, -1), 0)]):
        return CHANNELS_LAST
    return TRANSPOSED if _dense(sorted(sizes)) else STRIDED


def _dense(sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether steps follow from the sizes before them, the innermost first."""
    expected = 1
    for step, size in sizes:
        if size > 1 and step != expected:
            return False
        expected *= size
    return True
