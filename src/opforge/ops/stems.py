"""Common stems of operator names."""

from __future__ import annotations

import re

_STEM_PREFIXES = re.compile(
    r"^_*(?:(?:special|linalg|native|cudnn|mkldnn|miopen|mps|quantized|thnn|fused|sparse|nested|foreach|safe|chunk"
    r"|slow)_"
    r"|(?<=_)masked_)+"
)
_STEM_SUFFIXES = re.compile(
    r"(?:_?[123]d|_with_(?:indices|noise|update)|_legit|_no_training|_no_stats|_overrideable|_for_cpu|_functional"
    r"|_forward|_forward_only|_math|_impl)+$"
)
_FUNCTION_AFFIXES = re.compile(r"^structured_|(?:_(?:outf?|cpu|cuda|symint|impl|stub|kernel|mkldnn|native))*_?$")


def stem(packet: str) -> str:
    """Strip a packet's name of parts such as a library, a layout or a number of dimensions."""
    return packet if packet.endswith("_copy") else _STEM_SUFFIXES.sub("", _STEM_PREFIXES.sub("", packet).lstrip("_"))


def stem_of_function(name: str) -> str:
    """Return the operator stem of an ATen function: ``structured_mm_out_cpu`` implements ``mm``."""
    return stem(_FUNCTION_AFFIXES.sub("", name))
