"""Triangular factors: signs of QR and pivots of LU are free if the product is the matrix."""

from __future__ import annotations

import torch

from opforge.cases.tensors import to_float64
from opforge.judge.compare.properties.property_check import (
    Accepted,
    Results,
    all_finite,
    check_residuals,
    closest_to_bound,
    frobenius_norm,
    note_if_different,
    wrong_result,
)
from opforge.judge.compare.properties.spectral import check_matrix_residual, check_orthonormal


def qr(call: Results) -> Accepted | None:
    """Check Q R = A with orthonormal Q and upper triangular R; with mode='r', Rᴴ R = Aᴴ A."""
    matrix = to_float64(call.tensor_argument("A", "self"))
    if call.same_bits(0, 1) or not all_finite([*call.aten, *call.kernel]):
        return None
    _check_upper_triangular(call.result_names[1], call.kernel[1])
    pairs = [(to_float64(q), to_float64(r)) for q, r in (call.kernel, call.aten)]
    if not call.aten[0].numel():
        residuals = [frobenius_norm(r.mH @ r - matrix.mH @ matrix) for _, r in pairs]
        size = max(matrix.shape[-2:])
        figures = check_residuals(
            f"{call.result_names[1]}: Rᴴ R = Aᴴ A",
            residuals[0],
            residuals[1],
            frobenius_norm(matrix).square(),
            call.aten[1],
            size,
        )
    else:
        residuals = [frobenius_norm(q @ r - matrix) for q, r in pairs]
        figures = closest_to_bound(
            check_matrix_residual(f"{call.result_names[0]}: Q R = A", call, residuals, matrix),
            check_orthonormal(call, 0),
        )
    return Accepted(
        frozenset({0, 1}), note_if_different(call, 1, "signs of Q and R differ from ATen's; Q R = A holds"), figures
    )


def geqrf(call: Results) -> Accepted | None:
    """Check that the reflections in ``a`` and ``tau``, times the triangle in ``a``, give A."""
    matrix = to_float64(call.tensor_argument("self"))
    if call.same_bits(0, 1) or not matrix.numel() or not all_finite([*call.aten, *call.kernel]):
        return None
    k = min(matrix.shape[-2:])

    def unpacked(results: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        a, tau = (to_float64(t) for t in results)
        return torch.linalg.householder_product(a[..., :, :k].contiguous(), tau), a.triu()[..., :k, :]

    pairs = [unpacked(results) for results in (call.kernel, call.aten)]
    eye = torch.eye(k, dtype=matrix.dtype)
    residuals = [frobenius_norm(q @ r - matrix) for q, r in pairs]
    orthonormality = [frobenius_norm(q.mH @ q - eye) for q, _ in pairs]
    text = f"{call.result_names[0]}, {call.result_names[1]}: Q R = A"
    figures = closest_to_bound(
        check_matrix_residual(text, call, residuals, matrix),
        check_residuals(
            f"{call.result_names[1]}: orthonormality of Q",
            orthonormality[0],
            orthonormality[1],
            1.0,
            call.aten[0],
            max(matrix.shape[-2:]),
        ),
    )
    return Accepted(
        frozenset({0, 1}), note_if_different(call, 0, "reflections differ from ATen's; Q R = A holds"), figures
    )


def lu(call: Results) -> Accepted | None:
    """Check P L U = A with a permutation P and an upper triangular U.

    L is unit lower triangular with entries up to 1.
    """
    matrix = to_float64(call.tensor_argument("A"))
    if call.same_bits(0, 1, 2) or not call.arguments.get("pivot", True) or not matrix.numel():
        return None
    if not all_finite([*call.aten, *call.kernel]):
        return None
    p, lower, upper = (to_float64(t) for t in call.kernel)
    ones = [(p == 1).sum(d) for d in (-1, -2)]
    if not bool(((p == 0) | (p == 1)).all()) or not all(bool((n == 1).all()) for n in ones):
        raise wrong_result(f"{call.result_names[0]}: not a permutation")
    _check_upper_triangular(call.result_names[2], upper)
    k = min(matrix.shape[-2:])
    if bool((lower.triu()[..., :k, :k] != torch.eye(k, dtype=lower.dtype)).any()):
        raise wrong_result(f"{call.result_names[1]}: not lower triangular with ones on the diagonal")
    _check_pivoted_size(call.result_names[1], lower, to_float64(call.aten[1]))
    residuals = [
        frobenius_norm(p @ lower @ upper - matrix),
        _product_residual([to_float64(t) for t in call.aten], matrix),
    ]
    figures = check_matrix_residual(f"{call.result_names[0]}: P L U = A", call, residuals, matrix)
    return Accepted(
        frozenset({0, 1, 2}), note_if_different(call, 2, "pivots differ from ATen's; P L U = A holds"), figures
    )


def lu_packed(call: Results, *, factors_index: int = 0) -> Accepted | None:
    """Check P L U = A for packed factors and pivots; some operators factor the transpose.

    ``factors_index`` is the index of the result with the packed factors; the pivots follow it.
    """
    index = factors_index
    matrix = to_float64(call.tensor_argument("A", "self"))
    if call.same_bits(index, index + 1) or not call.arguments.get("pivot", True) or not matrix.numel():
        return None
    if not all_finite([call.aten[index], call.kernel[index]]):
        return None
    name, pivots = call.result_names[index], call.kernel[index + 1]
    first_allowed = torch.arange(1, pivots.shape[-1] + 1)
    if bool(((pivots < first_allowed) | (pivots > matrix.shape[-2])).any()):
        raise wrong_result(f"{call.result_names[index + 1]}: a pivot is not one of the remaining rows")
    kernel, aten = (_unpacked(results[index], results[index + 1]) for results in (call.kernel, call.aten))
    square = matrix.shape[-1] == matrix.shape[-2]
    if square and bool((_product_residual(aten, matrix) > _product_residual(aten, matrix.mH)).all()):
        matrix = matrix.mH
    elif square and bool((_product_residual(aten, matrix) > _product_residual(aten, matrix.mT)).all()):
        matrix = matrix.mT
    _check_pivoted_size(name, kernel[1], aten[1])
    residuals = [_product_residual(kernel, matrix), _product_residual(aten, matrix)]
    figures = check_residuals(
        f"{name}: P L U = A",
        residuals[0],
        residuals[1],
        frobenius_norm(matrix),
        call.aten[index],
        max(matrix.shape[-2:]),
    )
    return Accepted(
        frozenset({index, index + 1}),
        note_if_different(call, index, "pivots differ from ATen's; P L U = A holds"),
        figures,
    )


def _unpacked(packed: torch.Tensor, pivots: torch.Tensor) -> list[torch.Tensor]:
    return [to_float64(t) for t in torch.lu_unpack(packed, pivots)]


def _product_residual(factors: list[torch.Tensor], matrix: torch.Tensor) -> torch.Tensor:
    p, lower, upper = factors
    return frobenius_norm(p.to(lower.dtype) @ lower @ upper - matrix)


def _check_pivoted_size(name: str, lower: torch.Tensor, aten: torch.Tensor) -> None:
    """Check that pivoting kept the factors small.

    Complex pivots may be chosen by the sum of their parts.
    """
    allowed = max(1.0, float(aten.abs().max()) if aten.numel() else 1.0) * (2**0.5 if lower.is_complex() else 1.0)
    largest = float(lower.abs().max()) if lower.numel() else 0.0
    if largest > allowed * (1 + 1e-5):
        raise wrong_result(f"{name}: L has an entry of magnitude {largest:.3g}; pivoting keeps them at most 1")


def _check_upper_triangular(name: str, upper: torch.Tensor) -> None:
    if bool((upper.tril(-1) != 0).any()):
        raise wrong_result(f"{name}: not upper triangular")
