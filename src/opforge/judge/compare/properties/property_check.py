"""Arguments and outcomes of property checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.cases.tensors import same_bytes
from opforge.judge.verdict import RejectedError, VerdictKind

MAX_RESIDUAL_RATIO = 4.0
"""Multiple of ATen's residual that a kernel may have."""
_ALLOWED_ROUNDING_STEPS = 8.0
"""Rounding steps, times the size of the matrix and its norm, that are always allowed."""


@dataclass(frozen=True, slots=True)
class Results:
    """One call: its arguments, and all results of the kernel and of ATen, on the CPU."""

    packet: str
    arguments: dict[str, Any]
    """Arguments by their names in the schema; those left to their defaults are absent."""
    kernel: list[torch.Tensor]
    aten: list[torch.Tensor]
    result_names: list[str]
    """Name of each result."""

    def tensor_argument(self, *names: str) -> torch.Tensor:
        """Return the first of these arguments that was given."""
        argument: torch.Tensor = next(self.arguments[name] for name in names if name in self.arguments)
        return argument

    def same_bits(self, *indices: int) -> bool:
        """Whether these results have the same bits as ATen's."""
        return all(same_bytes(self.kernel[i], self.aten[i]) for i in indices)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Results that are right by a property, and need no comparison with ATen's numbers."""

    result_indices: frozenset[int]
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)


PropertyCheck = Callable[[Results], Accepted | None]
"""Returns the accepted results, or None if numbers decide; raises RejectedError otherwise."""


def wrong_result(text: str, **figures: float) -> RejectedError:
    return RejectedError(VerdictKind.WRONG, text, **figures)


def equal_or_both_nan(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two tensors are equal; NaN equals NaN."""
    return (left == right) | ((left != left) & (right != right))  # noqa: PLR0124  # NaN alone differs from itself


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def frobenius_norm(matrix: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of each matrix of a batch."""
    return matrix.abs().square().sum((-1, -2)).sqrt()


def check_residuals(
    label: str,
    kernel_residuals: torch.Tensor,
    aten_residuals: torch.Tensor,
    scale: torch.Tensor | float,
    dtype_source: torch.Tensor,
    size: int,
) -> dict[str, float]:
    """Check residuals, one per matrix, against ATen's; ``dtype_source`` has the computation's dtype."""
    allowed = MAX_RESIDUAL_RATIO * aten_residuals + _ALLOWED_ROUNDING_STEPS * size * torch.finfo(
        dtype_source.dtype
    ).eps * torch.as_tensor(scale)
    if not kernel_residuals.numel():
        return {"kernel_residual": 0.0, "aten_residual": 0.0, "residual_bound": 0.0}
    worst = int((kernel_residuals - allowed).argmax())
    kernel_residual, aten_residual, residual_bound = (
        float(t.expand(kernel_residuals.shape).reshape(-1)[worst]) for t in (kernel_residuals, aten_residuals, allowed)
    )
    if not kernel_residual <= residual_bound:
        raise wrong_result(
            f"{label} is off by {kernel_residual:.3g}, allowed {residual_bound:.3g} (ATen's own {aten_residual:.3g})",
            kernel_residual=kernel_residual,
            aten_residual=aten_residual,
            residual_bound=residual_bound,
        )
    return {"kernel_residual": kernel_residual, "aten_residual": aten_residual, "residual_bound": residual_bound}


def closest_to_bound(*figures: dict[str, float]) -> dict[str, float]:
    """Return the figures of the check that came closest to its bound."""
    return max(figures, key=lambda f: f["kernel_residual"] / max(f["residual_bound"], 1e-300))


def roughly_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two results differ by rounding only, precisely enough for a note."""
    size = float(right.abs().max()) if right.numel() else 0.0
    return bool(((left - right).abs() <= 1e-2 * max(size, 1e-30)).all())


def note_if_different(call: Results, index: int, text: str) -> str:
    """Return a note if a result differs from ATen's by more than rounding."""
    return "" if roughly_equal(call.kernel[index], call.aten[index]) else text
