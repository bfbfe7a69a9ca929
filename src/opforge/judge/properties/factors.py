"""Triangular factors: signs of QR and pivots of LU are free if the product is the matrix."""

from __future__ import annotations

import torch

from opforge.judge.properties.sight import (
    Ruling,
    Sight,
    bounded,
    close,
    finite,
    norm,
    wide,
    worst_of,
    wrong,
)
from opforge.judge.properties.spectral import orthonormal, residual

_PACKED_FACTORS_INDEX = {"_linalg_det": 1, "_linalg_solve_ex": 1, "_linalg_slogdet": 2}
"""Index of the result with the packed factors, if not the first; the pivots follow it."""


def qr(sight: Sight) -> Ruling | None:
    """Check Q R = A with orthonormal Q and upper triangular R; with mode='r', Rᴴ R = Aᴴ A."""
    matrix = wide(sight.tensor("A", "self"))
    if sight.same(0, 1) or not finite([*sight.aten, *sight.kernel]):
        return None
    _check_upper_triangular(sight.names[1], sight.kernel[1])
    pairs = [(wide(q), wide(r)) for q, r in (sight.kernel, sight.aten)]
    if not sight.aten[0].numel():
        residuals = [norm(r.mH @ r - matrix.mH @ matrix) for _, r in pairs]
        size = max(matrix.shape[-2:])
        figures = bounded(
            f"{sight.names[1]}: Rᴴ R = Aᴴ A", residuals[0], residuals[1], norm(matrix).square(), sight.aten[1], size
        )
    else:
        residuals = [norm(q @ r - matrix) for q, r in pairs]
        figures = worst_of(residual(f"{sight.names[0]}: Q R = A", sight, residuals, matrix), orthonormal(sight, 0))
    return Ruling(frozenset({0, 1}), _note(sight, 1, "signs of Q and R differ from ATen's; Q R = A holds"), figures)


def geqrf(sight: Sight) -> Ruling | None:
    """Check that the reflections in ``a`` and ``tau``, times the triangle in ``a``, give A."""
    matrix = wide(sight.tensor("self"))
    if sight.same(0, 1) or not matrix.numel() or not finite([*sight.aten, *sight.kernel]):
        return None
    k = min(matrix.shape[-2:])

    def unpacked(results: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        a, tau = (wide(t) for t in results)
        return torch.linalg.householder_product(a[..., :, :k].contiguous(), tau), a.triu()[..., :k, :]

    pairs = [unpacked(results) for results in (sight.kernel, sight.aten)]
    eye = torch.eye(k, dtype=matrix.dtype)
    residuals = [norm(q @ r - matrix) for q, r in pairs]
    orthonormality = [norm(q.mH @ q - eye) for q, _ in pairs]
    text = f"{sight.names[0]}, {sight.names[1]}: Q R = A"
    figures = worst_of(
        residual(text, sight, residuals, matrix),
        bounded(
            f"{sight.names[1]}: orthonormality of Q",
            orthonormality[0],
            orthonormality[1],
            1.0,
            sight.aten[0],
            max(matrix.shape[-2:]),
        ),
    )
    return Ruling(frozenset({0, 1}), _note(sight, 0, "reflections differ from ATen's; Q R = A holds"), figures)


def lu(sight: Sight) -> Ruling | None:
    """Check P L U = A with a permutation P and an upper triangular U.

    L is unit lower triangular with entries up to 1.
    """
    matrix = wide(sight.tensor("A"))
    if sight.same(0, 1, 2) or not sight.given.get("pivot", True) or not matrix.numel():
        return None
    if not finite([*sight.aten, *sight.kernel]):
        return None
    p, lower, upper = (wide(t) for t in sight.kernel)
    ones = [(p == 1).sum(d) for d in (-1, -2)]
    if not bool(((p == 0) | (p == 1)).all()) or not all(bool((n == 1).all()) for n in ones):
        raise wrong(f"{sight.names[0]}: not a permutation")
    _check_upper_triangular(sight.names[2], upper)
    k = min(matrix.shape[-2:])
    if bool((lower.triu()[..., :k, :k] != torch.eye(k, dtype=lower.dtype)).any()):
        raise wrong(f"{sight.names[1]}: not lower triangular with ones on the diagonal")
    _small(sight.names[1], lower, wide(sight.aten[1]))
    residuals = [norm(p @ lower @ upper - matrix), _product_residual([wide(t) for t in sight.aten], matrix)]
    figures = residual(f"{sight.names[0]}: P L U = A", sight, residuals, matrix)
    return Ruling(frozenset({0, 1, 2}), _note(sight, 2, "pivots differ from ATen's; P L U = A holds"), figures)


def lu_packed(sight: Sight) -> Ruling | None:
    """Check P L U = A for packed factors and pivots; some operators factor the transpose."""
    index = _PACKED_FACTORS_INDEX.get(sight.packet, 0)
    matrix = wide(sight.tensor("A", "self"))
    if sight.same(index, index + 1) or not sight.given.get("pivot", True) or not matrix.numel():
        return None
    if not finite([sight.aten[index], sight.kernel[index]]):
        return None
    name, pivots = sight.names[index], sight.kernel[index + 1]
    first_allowed = torch.arange(1, pivots.shape[-1] + 1)
    if bool(((pivots < first_allowed) | (pivots > matrix.shape[-2])).any()):
        raise wrong(f"{sight.names[index + 1]}: a pivot is none of the rows that are left")
    kernel, aten = (_unpacked(results[index], results[index + 1]) for results in (sight.kernel, sight.aten))
    square = matrix.shape[-1] == matrix.shape[-2]
    if square and bool((_product_residual(aten, matrix) > _product_residual(aten, matrix.mH)).all()):
        matrix = matrix.mH
    elif square and bool((_product_residual(aten, matrix) > _product_residual(aten, matrix.mT)).all()):
        matrix = matrix.mT
    _small(name, kernel[1], aten[1])
    residuals = [_product_residual(kernel, matrix), _product_residual(aten, matrix)]
    figures = bounded(
        f"{name}: P L U = A", residuals[0], residuals[1], norm(matrix), sight.aten[index], max(matrix.shape[-2:])
    )
    return Ruling(
        frozenset({index, index + 1}), _note(sight, index, "pivots differ from ATen's; P L U = A holds"), figures
    )


def _unpacked(packed: torch.Tensor, pivots: torch.Tensor) -> list[torch.Tensor]:
    return [wide(t) for t in torch.lu_unpack(packed, pivots)]


def _product_residual(factors: list[torch.Tensor], matrix: torch.Tensor) -> torch.Tensor:
    p, lower, upper = factors
    return norm(p.to(lower.dtype) @ lower @ upper - matrix)


def _small(name: str, lower: torch.Tensor, aten: torch.Tensor) -> None:
    """Check that pivoting kept the factors small.

    Complex pivots may be chosen by the sum of their parts.
    """
    allowed = max(1.0, float(aten.abs().max()) if aten.numel() else 1.0) * (2**0.5 if lower.is_complex() else 1.0)
    largest = float(lower.abs().max()) if lower.numel() else 0.0
    if largest > allowed * (1 + 1e-5):
        raise wrong(f"{name}: L has an entry of size {largest:.3g}; pivoting keeps them up to 1")


def _check_upper_triangular(name: str, upper: torch.Tensor) -> None:
    if bool((upper.tril(-1) != 0).any()):
        raise wrong(f"{name}: not upper triangular")


def _note(sight: Sight, index: int, text: str) -> str:
    return "" if close(sight.kernel[index], sight.aten[index]) else text
