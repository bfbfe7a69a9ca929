"""What operators with names that are alike have in common."""

from __future__ import annotations

import re

_BEFORE_STEM = re.compile(
    r"^_*(?:(?:special|linalg|native|cudnn|mkldnn|miopen|mps|quantized|thnn|fused|sparse|nested|foreach|safe|chunk|slow)_"
    r"|(?<=_)masked_)+"
)
_BEHIND_STEM = re.compile(
    r"(?:_?[123]d|_with_(?:indices|noise|update)|_legit|_no_training|_no_stats|_overrideable|_for_cpu|_functional"
    r"|_forward|_forward_only|_math|_impl)+$"
)
_AROUND_FUNCTION = re.compile(r"^structured_|(?:_(?:outf?|cpu|cuda|symint|impl|stub|kernel|mkldnn|native))*_?$")


def stem(packet: str) -> str:
    """Return what is left of a packet's name without the words for a library, a layout, a number of dimensions and the like."""
    return packet if packet.endswith("_copy") else _BEHIND_STEM.sub("", _BEFORE_STEM.sub("", packet).lstrip("_"))


def stem_of_function(name: str) -> str:
    """Return the stem of the operator that a function of ATen's is for: ``structured_mm_out_cpu`` is for ``mm``."""
    return stem(_AROUND_FUNCTION.sub("", name))
