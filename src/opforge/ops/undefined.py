"""Operators whose contents PyTorch does not define."""

from __future__ import annotations

UNDEFINED_CONTENTS = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_",
    "resize_as_", "_resize_output", "_resize_output_", "empty_quantized", "_empty_affine_quantized",
})  # fmt: skip
"""Bases whose contents PyTorch does not define: only their contract is judged."""
