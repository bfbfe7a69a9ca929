"""Names for the memory layouts of tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CONTIGUOUS, CHANNELS_LAST, TRANSPOSED, OFFSET, EMPTY = (
    "contiguous", "channels_last", "transposed", "offset", "empty",
)  # fmt: skip
PITCHED = "pitched"
"""Gaps between rows, none within a row: ``x[:, :k]``."""
STRIDED = "strided"
"""Gaps between the elements of a row: ``x[:, ::2]``."""
PERMUTED = "permuted"
"""Gaps, and dimensions in another order than in memory: ``x[:, :k].t()``."""
OVERLAPPING = "overlapping"
"""Several elements at one address, as in sliding windows."""
EXPANDED = "expanded"
"""Stride 0 in some dimension, but not the last."""
EXPANDED_LAST = "expanded_last"
"""Stride 0 in the last dimension."""
SHAPES_DIFFER = "shapes differ"
"""Listed with layouts: the tensors of a call differ in shape, as with broadcasting."""


def layout_names(shape: Sequence[int], stride: Sequence[int]) -> frozenset[str]:
    """Return the layout for a shape and strides. An expanded tensor may have a second layout."""
    if 0 in shape:
        return frozenset({EMPTY})
    sizes = [(step, size) for size, step in zip(shape, stride, strict=True) if size > 1]
    nonzero = [(step, size) for step, size in sizes if step]
    layout = _nonzero_stride_layout(nonzero)
    if len(nonzero) < len(sizes):
        expanded = EXPANDED if sizes[-1][0] else EXPANDED_LAST
        return frozenset({expanded} if layout == CONTIGUOUS else {expanded, layout})
    if layout != CONTIGUOUS and len(shape) in (4, 5):
        order = (1, *range(len(shape) - 1, 1, -1), 0)
        if _is_dense([(stride[i], shape[i]) for i in order if shape[i] > 1]):
            return frozenset({CHANNELS_LAST})
    return frozenset({layout})


def _nonzero_stride_layout(sizes: Sequence[tuple[int, int]]) -> str:
    """Return the layout of dimensions with nonzero strides, given as (stride, size)."""
    if _is_dense(reversed(sizes)):
        return CONTIGUOUS
    inner_first = sorted(sizes)
    if _is_dense(inner_first):
        return TRANSPOSED
    if _overlap(inner_first):
        return OVERLAPPING
    if [*reversed(sizes)] != inner_first:
        return PERMUTED
    return PITCHED if sizes[-1][0] == 1 else STRIDED


def _overlap(sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether a stride lies within the span of the inner dimensions; innermost first."""
    reached = 0
    for step, size in sizes:
        if step <= reached:
            return True
        reached += step * (size - 1)
    return False


def _is_dense(sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether each stride is the product of the sizes before it; innermost first."""
    expected = 1
    for step, size in sizes:
        if step != expected:
            return False
        expected *= size
    return True
