"""Names and shapes of a case's variants, without creating them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from opforge.runtime import layouts

SAME_ELEMENT_VARIANTS = frozenset(
    {
        layouts.TRANSPOSED,
        layouts.PITCHED,
        layouts.STRIDED,
        layouts.PERMUTED,
        layouts.OFFSET,
        layouts.CHANNELS_LAST,
    }
)
"""Variants that change only how elements lie in memory."""
LAYOUT_VARIANT_NAMES = SAME_ELEMENT_VARIANTS | {layouts.EXPANDED, layouts.EXPANDED_LAST, layouts.EMPTY}
"""Variants that are layouts, by their names in the runtime."""
SIXTEENFOLD = "sixteenfold"
LONG_MASKED = "long_masked"
LARGE_VARIANT_NAMES = ("long_rows", "many_rows", "long_pitched", SIXTEENFOLD, LONG_MASKED)
"""Variants with more than 2**16 elements, in rows longer than one block or in that many rows."""
DIM_VARIANTS = (SIXTEENFOLD, LONG_MASKED)
"""Large variants that depend on the dimension argument of a call."""
EQUAL_SIZE_VARIANTS = tuple(variant for variant in LARGE_VARIANT_NAMES if variant != SIXTEENFOLD)
"""Large variants in which all tensors have the same sizes.

Gradients may have sizes that do not grow alike, and ATen does not check.
"""
ONE_TENSOR_TWICE = "one_tensor_twice"
_MAX_16_BIT_COUNT = 1 << 16
_LONG_ROW_ELEMENTS = 4099
"""Longer than a likely block of a kernel, and not a multiple of one."""
_GROWTH_FACTOR = 16
_MAX_SIXTEENFOLD_ELEMENTS = 1 << 17
_BLOCK = 256
"""``many_rows`` has a multiple of it: some kernels are wrong only without a partial block."""


def enlarged_shapes(variant: str, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Return the shapes of a call's tensors in a large variant; None if there is no such variant.

    They broadcast as before.
    """
    if variant == SIXTEENFOLD:
        return _with_sixteenfold(shapes)
    common = _broadcast(shapes)
    if not common or 0 in common or (variant not in ("long_rows", LONG_MASKED) and len(common) < 2):
        return None
    large = _with_many_rows(common) if variant == "many_rows" else _with_long_rows(common)
    return [_enlarged(shape, common, large) for shape in shapes]


def _with_sixteenfold(shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Return shapes with dimensions sixteen times as long.

    All dimensions, the last two or the last one grow, depending on the number of elements.
    """
    for last in (max(map(len, shapes), default=0), 2, 1):
        grown = [
            tuple(size if size == 1 or len(shape) - i > last else _GROWTH_FACTOR * size for i, size in enumerate(shape))
            for shape in shapes
        ]
        if sum(map(math.prod, grown)) <= _MAX_SIXTEENFOLD_ELEMENTS:
            return grown
    return None


def _enlarged(shape: Sequence[int], common: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
    skipped = len(common) - len(shape)
    rows = zip(shape, common[skipped:], large[skipped:], strict=True)
    return tuple(1 if size == 1 and common_size != 1 else large_size for size, common_size, large_size in rows)


def _with_long_rows(common: Sequence[int]) -> list[int]:
    if len(common) == 1:
        return [_MAX_16_BIT_COUNT + _LONG_ROW_ELEMENTS]
    outer = [min(size, 2) for size in common[:-2]]
    return [*outer, _MAX_16_BIT_COUNT // (_LONG_ROW_ELEMENTS * math.prod(outer)) + 2, _LONG_ROW_ELEMENTS]


def _with_many_rows(common: Sequence[int]) -> list[int]:
    inner = [min(size, 8) for size in common[1:]]
    rows = max(_LONG_ROW_ELEMENTS, _MAX_16_BIT_COUNT // math.prod(inner) + 3)
    return [rows + -rows % _BLOCK, *inner]


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the shape that shapes broadcast to; None if they do not."""
    common: list[int] = []
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        several = {*sizes} - {1}
        if len(several) > 1:
            return None
        common.insert(0, several.pop() if several else 1)
    return common
