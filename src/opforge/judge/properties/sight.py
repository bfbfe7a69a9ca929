"""Arguments and outcomes of property checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.judge.numerics import same_bytes
from opforge.judge.verdict import NotRightError, Outcome

FACTOR = 4.0
"""Multiple of ATen's residual that a kernel may have."""
_STEPS = 8.0
"""Rounding steps, times the size of the matrix and its norm, that are always allowed."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One call: its arguments, and all results of the kernel and of ATen, on the CPU."""

    packet: str
    given: dict[str, Any]
    """Arguments by their names in the schema; those left to their defaults are absent."""
    kernel: list[torch.Tensor]
    aten: list[torch.Tensor]
    names: list[str]
    """Name of each result."""

    def tensor(self, *names: str) -> torch.Tensor:
        """Return the first of these arguments that was given."""
        argument: torch.Tensor = next(self.given[name] for name in names if name in self.given)
        return argument

    def same(self, *results: int) -> bool:
        """Whether these results have the same bits as ATen's."""
        return all(same_bytes(self.kernel[i], self.aten[i]) for i in results)


@dataclass(frozen=True, slots=True)
class Ruling:
    """Results that are right by a property, and need no comparison with ATen's numbers."""

    covered: frozenset[int]
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)


Property = Callable[[Sight], Ruling | None]
"""Returns a ruling, or None if numbers decide; raises NotRightError if the property is broken."""


def wrong(text: str, **figures: float) -> NotRightError:
    return NotRightError(Outcome.WRONG, text, **figures)


def equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two tensors are equal; NaN equals NaN."""
    return (left == right) | ((left != left) & (right != right))  # noqa: PLR0124  # NaN alone differs from itself


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def norm(matrix: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of each matrix of a batch."""
    return matrix.abs().square().sum((-1, -2)).sqrt()


def bounded(
    text: str, kernel: torch.Tensor, aten: torch.Tensor, scale: torch.Tensor | float, like: torch.Tensor, size: int
) -> dict[str, float]:
    """Check residuals, one per matrix, against ATen's; ``like`` has the computation's dtype."""
    allowed = FACTOR * aten + _STEPS * size * torch.finfo(like.dtype).eps * torch.as_tensor(scale)
    if not kernel.numel():
        return {"kernel_residual": 0.0, "aten_residual": 0.0, "residual_bound": 0.0}
    worst = int((kernel - allowed).argmax())
    kernel_residual, aten_residual, residual_bound = (
        float(t.expand(kernel.shape).reshape(-1)[worst]) for t in (kernel, aten, allowed)
    )
    if not kernel_residual <= residual_bound:
        raise wrong(
            f"{text} is off by {kernel_residual:.3g}, allowed {residual_bound:.3g} (ATen's own {aten_residual:.3g})",
            kernel_residual=kernel_residual,
            aten_residual=aten_residual,
            residual_bound=residual_bound,
        )
    return {"kernel_residual": kernel_residual, "aten_residual": aten_residual, "residual_bound": residual_bound}


def worst_of(*figures: dict[str, float]) -> dict[str, float]:
    """Return the figures of the check that came closest to its bound."""
    return max(figures, key=lambda f: f["kernel_residual"] / max(f["residual_bound"], 1e-300))


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two results differ by rounding only, precisely enough for a note."""
    size = float(right.abs().max()) if right.numel() else 0.0
    return bool(((left - right).abs() <= 1e-2 * max(size, 1e-30)).all())
