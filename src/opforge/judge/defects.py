"""Hostile forms that PyTorch itself does not survive, found with the allocator's checks on: they are not asked of anyone."""

from __future__ import annotations

from opforge.ops import Operator

_SOLVERS = frozenset({
    "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "lu_solve", "lu_unpack", "orgqr", "ormqr", "qr", "svd",
    "triangular_solve", "_lu_with_info", "logdet", "slogdet", "det", "inverse", "pinverse", "matrix_exp",
})  # fmt: skip
"""With those named ``linalg_``: LAPACK does not say what it does with NaN, infinities and extremes."""

_CRASHES: dict[str, frozenset[str]] = {}
"""By packet: ATen writes beyond its memory, or stops the process."""


def solves(packet: str) -> bool:
    """Whether an operator solves equations or finds eigenvalues, so that values that hurt have no defined answer."""
    return packet in _SOLVERS or packet.lstrip("_").startswith("linalg_")


def of(op: Operator) -> frozenset[str]:
    """Return the twists that ATen does not survive on an operator."""
    return _CRASHES.get(op.packet, frozenset())
