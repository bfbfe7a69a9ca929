"""How the elements of a tensor lie in memory, in words. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CONTIGUOUS, CHANNELS_LAST, TRANSPOSED, OFFSET, EMPTY = (
    "contiguous", "channels_last", "transposed", "offset", "empty",
)  # fmt: skip
PITCHED = "pitched"
"""Rows without gaps in them, and gaps between rows: ``x[:, :k]``."""
STRIDED = "strided"
"""Gaps between the elements of a row: ``x[:, ::2]``."""
PERMUTED = "permuted"
"""Gaps, and dimensions in another order than memory has them: ``x[:, :k].t()``."""
OVERLAPPING = "overlapping"
"""Several elements in one place, as windows have them."""
EXPANDED = "expanded"
"""One place for all along some dimension, and not the last one."""
EXPANDED_LAST = "expanded_last"
"""One place for a whole row."""
SHAPES_DIFFER = "shapes differ"
"""Beside layouts: the tensors of a call are not all of one shape, as where one is broadcast."""


def layouts(shape: Sequence[int], stride: Sequence[int]) -> frozenset[str]:
    """Return the layout of a shape and strides; of an expanded tensor with what else is to be said of it."""
    if 0 in shape:
        return frozenset({EMPTY})
    sizes = [(step, size) for size, step in zip(shape, stride, strict=True) if size > 1]
    own = [(step, size) for step, size in sizes if step]
    rest = _of_distinct(own)
    if len(own) < len(sizes):
        expanded = EXPANDED if sizes[-1][0] else EXPANDED_LAST
        return frozenset({expanded} if rest == CONTIGUOUS else {expanded, rest})
    if rest != CONTIGUOUS and len(shape) in (4, 5):
        order = (1, *range(len(shape) - 1, 1, -1), 0)
        if _dense([(stride[i], shape[i]) for i in order if shape[i] > 1]):
            return frozenset({CHANNELS_LAST})
    return frozenset({rest})


def _of_distinct(sizes: Sequence[tuple[int, int]]) -> str:
    """Return the layout of dimensions of more than one place, each with its step and its size."""
    if _dense(reversed(sizes)):
        return CONTIGUOUS
    inner_first = sorted(sizes)
    if _dense(inner_first):
        return TRANSPOSED
    if _overlap(inner_first):
        return OVERLAPPING
    if [*reversed(sizes)] != inner_first:
        return PERMUTED
    return PITCHED if sizes[-1][0] == 1 else STRIDED


def _overlap(sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether a step, the innermost first, ends inside of what the steps before it reach."""
    reached = 0
    for step, size in sizes:
        if step <= reached:
            return True
        reached += step * (size - 1)
    return False


def _dense(sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether steps follow from the sizes before them, the innermost first."""
    expected = 1
    for step, size in sizes:
        if step != expected:
            return False
        expected *= size
    return True
