"""Operators whose zeros have signs that do not depend on the way of computing."""

from __future__ import annotations

from opforge.ops import Operator

_MOVING_BASES = frozenset({
    "alias", "as_strided", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "diag", "diag_embed", "diagonal", "detach",
    "expand", "flip", "gather", "index", "index_select", "masked_fill", "masked_scatter", "masked_select", "narrow", "permute",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat",
    "repeat_interleave", "replication_pad1d", "replication_pad2d", "replication_pad3d", "reshape", "roll", "rot90", "select",
    "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "take", "transpose",
    "tril", "triu", "unbind", "unfold", "unsqueeze", "view",
})  # fmt: skip
"""Bases that move elements and compute nothing."""
_COMPARISON_BASES = frozenset({
    "amax", "amin", "celu", "clamp", "clamp_max", "clamp_min", "clip", "elu", "fmax", "fmin", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "heaviside", "leaky_relu", "maximum", "minimum", "nan_to_num", "prelu", "_prelu_kernel", "relu",
    "relu6", "remainder", "rrelu", "selu", "sgn", "sign", "softshrink", "threshold",
})  # fmt: skip
"""Bases defined by comparisons, for which both zeros are equal.

ATen's own sign differs there between loops or formulas.
"""


def zero_signs_matter(op: Operator, *, is_complex: bool = False) -> bool:
    """Whether the zeros of an operator's results must have ATen's signs.

    The signs in complex products differ by formula.
    """
    base = op.base.removesuffix("_").removesuffix("_copy")
    if base in _COMPARISON_BASES or "_backward" in base or op.is_random:
        return False
    return base in _MOVING_BASES or ("pointwise" in op.tags and not is_complex)
