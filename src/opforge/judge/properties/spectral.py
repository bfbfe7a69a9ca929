"""Eigenvectors and singular vectors: any basis that decomposes the matrix is right."""

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

_MIN_INDEPENDENCE_RATIO = 1e-2
"""Eigenvectors may be this much closer to dependent than ATen's: bases of an eigenspace differ."""


def eigh(sight: Sight) -> Ruling | None:
    """Check A V = V Λ with orthonormal V; the eigenvalues are compared as numbers."""
    if sight.same(1) or not sight.kernel[1].numel() or not finite([sight.aten[1], sight.kernel[1], sight.kernel[0]]):
        return None
    matrix = _hermitian(wide(sight.tensor("A", "self")), upper=sight.given.get("UPLO", "L").upper() == "U")
    pairs = [(wide(values), wide(vectors)) for values, vectors in (sight.kernel, sight.aten)]
    figures = worst_of(
        residual(
            f"{sight.names[1]}: A V = V Λ", sight, [norm(matrix @ v - v * w.unsqueeze(-2)) for w, v in pairs], matrix
        ),
        orthonormal(sight, 1),
    )
    return Ruling(frozenset({1}), _note(sight, 1, "eigenvectors differ from ATen's; A V = V Λ holds"), figures)


def eig(sight: Sight) -> Ruling | None:
    """Check A V = V Λ with independent columns of norm 1; the eigenvalues in any order."""
    if sight.same(0, 1) or not sight.kernel[1].numel() or not finite([*sight.aten, *sight.kernel]):
        return None
    matrix = sight.tensor("self").to(torch.complex128)
    pairs = [(wide(values), wide(vectors)) for values, vectors in (sight.kernel, sight.aten)]
    of_values = _check_eigenvalues(sight)
    text = f"{sight.names[1]}: A V = V Λ"
    of_vectors = residual(text, sight, [norm(matrix @ v - v * w.unsqueeze(-2)) for w, v in pairs], matrix)
    norm_errors = [(v.abs().square().sum(-2).sqrt() - 1).abs().amax(-1) for _, v in pairs]
    norm_text = f"{sight.names[1]}: the norm of an eigenvector"
    of_lengths = bounded(norm_text, norm_errors[0], norm_errors[1], 1.0, sight.aten[1], matrix.shape[-1])
    smallest = [torch.linalg.svdvals(v).amin(-1) for _, v in pairs]
    steps = matrix.shape[-1] * torch.finfo(sight.aten[1].dtype).eps
    if bool((smallest[0] < _MIN_INDEPENDENCE_RATIO * smallest[1] - steps).any()):
        raise wrong(f"{sight.names[1]}: the eigenvectors are not independent, and ATen's are")
    note = _note(sight, 1, "eigenvalues or eigenvectors differ from ATen's in order or scale; A V = V Λ holds")
    return Ruling(frozenset({0, 1}), note, worst_of(of_values, of_vectors, of_lengths))


def eigvals(sight: Sight) -> Ruling | None:
    """Check for the same eigenvalues in any order."""
    if sight.same(0) or not sight.kernel[0].numel() or not finite([*sight.aten, *sight.kernel]):
        return None
    figures = _check_eigenvalues(sight)
    return Ruling(frozenset({0}), _note(sight, 0, "eigenvalues stand in another order than ATen's"), figures)


def svd(sight: Sight) -> Ruling | None:
    """Check U S Vh = A with orthonormal U and V; the singular values are compared as numbers."""
    if not sight.given.get("compute_uv", True) or sight.same(0, 2) or not finite([*sight.aten, *sight.kernel]):
        return None
    matrix = wide(sight.tensor("A", "self"))
    returns_v = sight.packet == "svd"  # its third result is V, not Vh

    def off(results: list[torch.Tensor]) -> torch.Tensor:
        u, s, vh = wide(results[0]), wide(results[1]), wide(results[2].mH if returns_v else results[2])
        k = s.shape[-1]
        return norm((u[..., :, :k] * s.unsqueeze(-2)) @ vh[..., :k, :] - matrix)

    text = f"{sight.names[0]}, {sight.names[2]}: U S Vh = A"
    product = residual(text, sight, [off(sight.kernel), off(sight.aten)], matrix)
    figures = worst_of(product, orthonormal(sight, 0), orthonormal(sight, 2, rows=not returns_v))
    note = _note(sight, 0, "singular vectors differ from ATen's; U S Vh = A holds")
    return Ruling(frozenset({0, 2}), note, figures)


def _check_eigenvalues(sight: Sight) -> dict[str, float]:
    """Compare the eigenvalues of the kernel and of ATen with the nearest ones in float64."""
    matrix = sight.tensor("self").to(torch.complex128)
    exact = torch.linalg.eigvals(matrix)
    size = exact.shape[-1]
    errors = [
        torch.stack(
            [_matched_distance(*pair) for pair in zip(values.reshape(-1, size), exact.reshape(-1, size), strict=True)]
        )
        for values in (wide(sight.kernel[0]), wide(sight.aten[0]))
    ]
    return bounded(
        f"{sight.names[0]}: an eigenvalue", errors[0], errors[1], norm(matrix).reshape(-1), sight.aten[0], size
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


def residual(text: str, sight: Sight, off: list[torch.Tensor], matrix: torch.Tensor) -> dict[str, float]:
    like = sight.aten[0]
    return bounded(text, off[0], off[1], norm(matrix), like, max(matrix.shape[-2:]))


def orthonormal(sight: Sight, index: int, *, rows: bool = False) -> dict[str, float]:
    """Check that the columns of a result, or its rows, are orthonormal."""

    def off(tensor: torch.Tensor) -> torch.Tensor:
        basis = wide(tensor).mH if rows else wide(tensor)
        return norm(basis.mH @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype))

    kernel, aten = sight.kernel[index], sight.aten[index]
    text = f"{sight.names[index]}: orthonormality of its {'rows' if rows else 'columns'}"
    return bounded(text, off(kernel), off(aten), 1.0, aten, max(kernel.shape[-2:]))


def _hermitian(matrix: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """Return the full matrix from one triangle; the diagonal counts as real."""
    strict = matrix.triu(1) if upper else matrix.tril(-1)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal = diagonal.real.to(matrix.dtype) if matrix.is_complex() else diagonal
    return strict + strict.mH + torch.diag_embed(diagonal)


def _note(sight: Sight, index: int, text: str) -> str:
    return "" if close(sight.kernel[index], sight.aten[index]) else text
