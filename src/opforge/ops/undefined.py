"""Operators with results that PyTorch does not fully define."""

from __future__ import annotations

UNDEFINED_CONTENTS = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_",
    "resize_as_", "_resize_output", "_resize_output_", "empty_quantized", "_empty_affine_quantized",
})  # fmt: skip
"""Base names of operators with undefined result values; only their contract is judged."""

_SOLVERS = frozenset({
    "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "lu_solve", "lu_unpack", "orgqr", "ormqr", "qr", "svd",
    "triangular_solve", "_lu_with_info", "logdet", "slogdet", "det", "inverse", "pinverse", "matrix_exp",
})  # fmt: skip
"""Solvers besides ``linalg_*``. LAPACK leaves NaN, extremes and singular matrices undefined."""


def is_solver(packet: str) -> bool:
    """Whether an operator solves equations or finds eigenvalues."""
    return packet in _SOLVERS or packet.lstrip("_").startswith("linalg_")
