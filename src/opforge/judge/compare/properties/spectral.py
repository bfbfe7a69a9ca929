"""Eigenvectors and singular vectors: any basis that decomposes the matrix is right."""

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

_MIN_INDEPENDENCE_RATIO = 1e-2
"""Eigenvectors may be this much closer to dependent than ATen's: bases of an eigenspace differ."""


def eigh(call: Results) -> Accepted | None:
    """Check A V = V Λ with orthonormal V; the eigenvalues are compared as numbers."""
    if (
        call.same_bits(1)
        or not call.kernel[1].numel()
        or not all_finite([call.aten[1], call.kernel[1], call.kernel[0]])
    ):
        return None
    matrix = _hermitian(
        to_float64(call.tensor_argument("A", "self")), upper=call.arguments.get("UPLO", "L").upper() == "U"
    )
    pairs = [(to_float64(values), to_float64(vectors)) for values, vectors in (call.kernel, call.aten)]
    figures = closest_to_bound(
        check_matrix_residual(
            f"{call.result_names[1]}: A V = V Λ",
            call,
            [frobenius_norm(matrix @ v - v * w.unsqueeze(-2)) for w, v in pairs],
            matrix,
        ),
        check_orthonormal(call, 1),
    )
    return Accepted(
        frozenset({1}), note_if_different(call, 1, "eigenvectors differ from ATen's; A V = V Λ holds"), figures
    )


def eig(call: Results) -> Accepted | None:
    """Check A V = V Λ with independent columns of norm 1; the eigenvalues in any order."""
    if call.same_bits(0, 1) or not call.kernel[1].numel() or not all_finite([*call.aten, *call.kernel]):
        return None
    matrix = call.tensor_argument("self").to(torch.complex128)
    pairs = [(to_float64(values), to_float64(vectors)) for values, vectors in (call.kernel, call.aten)]
    of_values = _check_eigenvalues(call)
    text = f"{call.result_names[1]}: A V = V Λ"
    of_vectors = check_matrix_residual(
        text, call, [frobenius_norm(matrix @ v - v * w.unsqueeze(-2)) for w, v in pairs], matrix
    )
    norm_errors = [(v.abs().square().sum(-2).sqrt() - 1).abs().amax(-1) for _, v in pairs]
    norm_text = f"{call.result_names[1]}: the norm of an eigenvector"
    of_lengths = check_residuals(norm_text, norm_errors[0], norm_errors[1], 1.0, call.aten[1], matrix.shape[-1])
    smallest = [torch.linalg.svdvals(v).amin(-1) for _, v in pairs]
    steps = matrix.shape[-1] * torch.finfo(call.aten[1].dtype).eps
    if bool((smallest[0] < _MIN_INDEPENDENCE_RATIO * smallest[1] - steps).any()):
        raise wrong_result(f"{call.result_names[1]}: the eigenvectors are not independent, and ATen's are")
    note = note_if_different(
        call, 1, "eigenvalues or eigenvectors differ from ATen's in order or scale; A V = V Λ holds"
    )
    return Accepted(frozenset({0, 1}), note, closest_to_bound(of_values, of_vectors, of_lengths))


def eigvals(call: Results) -> Accepted | None:
    """Check for the same eigenvalues in any order."""
    if call.same_bits(0) or not call.kernel[0].numel() or not all_finite([*call.aten, *call.kernel]):
        return None
    figures = _check_eigenvalues(call)
    return Accepted(frozenset({0}), note_if_different(call, 0, "eigenvalues are in another order than ATen's"), figures)


def svd(call: Results) -> Accepted | None:
    """Check U S Vh = A with orthonormal U and V; the singular values are compared as numbers."""
    if not call.arguments.get("compute_uv", True) or call.same_bits(0, 2) or not all_finite([*call.aten, *call.kernel]):
        return None
    matrix = to_float64(call.tensor_argument("A", "self"))
    returns_v = call.packet == "svd"  # its third result is V, not Vh

    def off(results: list[torch.Tensor]) -> torch.Tensor:
        u, s, vh = (
            to_float64(results[0]),
            to_float64(results[1]),
            to_float64(results[2].mH if returns_v else results[2]),
        )
        k = s.shape[-1]
        return frobenius_norm((u[..., :, :k] * s.unsqueeze(-2)) @ vh[..., :k, :] - matrix)

    text = f"{call.result_names[0]}, {call.result_names[2]}: U S Vh = A"
    product = check_matrix_residual(text, call, [off(call.kernel), off(call.aten)], matrix)
    figures = closest_to_bound(product, check_orthonormal(call, 0), check_orthonormal(call, 2, rows=not returns_v))
    note = note_if_different(call, 0, "singular vectors differ from ATen's; U S Vh = A holds")
    return Accepted(frozenset({0, 2}), note, figures)


def _check_eigenvalues(call: Results) -> dict[str, float]:
    """Compare the eigenvalues of the kernel and of ATen with the nearest ones in float64."""
    matrix = call.tensor_argument("self").to(torch.complex128)
    exact = torch.linalg.eigvals(matrix)
    size = exact.shape[-1]
    errors = [
        torch.stack(
            [_matched_distance(*pair) for pair in zip(values.reshape(-1, size), exact.reshape(-1, size), strict=True)]
        )
        for values in (to_float64(call.kernel[0]), to_float64(call.aten[0]))
    ]
    return check_residuals(
        f"{call.result_names[0]}: an eigenvalue",
        errors[0],
        errors[1],
        frobenius_norm(matrix).reshape(-1),
        call.aten[0],
        size,
    )


def _matched_distance(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the largest distance if each value is paired with one exact value, nearest first."""
    distances = (values[:, None] - exact[None, :]).abs()
    largest = torch.zeros(())
    for _ in range(len(values)):
        row, column = divmod(int(distances.argmin()), len(exact))
        largest = torch.maximum(largest, distances[row, column])
        distances[row, :] = torch.inf
        distances[:, column] = torch.inf
    return largest.double()


def check_matrix_residual(
    label: str, call: Results, residuals: list[torch.Tensor], matrix: torch.Tensor
) -> dict[str, float]:
    like = call.aten[0]
    return check_residuals(label, residuals[0], residuals[1], frobenius_norm(matrix), like, max(matrix.shape[-2:]))


def check_orthonormal(call: Results, index: int, *, rows: bool = False) -> dict[str, float]:
    """Check that the columns of a result, or its rows, are orthonormal."""

    def off(tensor: torch.Tensor) -> torch.Tensor:
        basis = to_float64(tensor).mH if rows else to_float64(tensor)
        return frobenius_norm(basis.mH @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype))

    kernel, aten = call.kernel[index], call.aten[index]
    text = f"{call.result_names[index]}: orthonormality of its {'rows' if rows else 'columns'}"
    return check_residuals(text, off(kernel), off(aten), 1.0, aten, max(kernel.shape[-2:]))


def _hermitian(matrix: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """Return the full matrix from one triangle; the diagonal counts as real."""
    strict = matrix.triu(1) if upper else matrix.tril(-1)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal = diagonal.real.to(matrix.dtype) if matrix.is_complex() else diagonal
    return strict + strict.mH + torch.diag_embed(diagonal)
