"""Compare a tensor of a model, or of another program of several operators, as the judge compares results.

The bound is that of ``judge/compare/numerics.py``, element by element. ATen's own error in a model
depends on rounding by chance. So where one run's error is not enough, it is measured several times,
from weights and inputs perturbed by a rounding step, and the largest counts. Integers and booleans
may differ in a few times as many elements as they do then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.tensors import to_float64
from opforge.judge.compare.numerics import MAX_ERROR_RATIO, Comparison, ReferenceAnswers
from opforge.judge.reference.aten import wide_dtype
from opforge.judge.verdict import RejectedError

MAX_FLOAT64_DEVIATION = 0.25
"""Typical relative error of ATen beyond which the float64 run took another path of the model."""


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor of a run with kernels, compared with ATen's and float64's."""

    name: str
    reason: str = ""
    """Why it is wrong; empty if it is right."""
    error: float = 0.0
    """Error of the element that decides, ATen's error there, and the allowed error."""
    aten_error: float = 0.0
    bound: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.reason

    @property
    def excess(self) -> float:
        """Return the ratio of the error to the allowed error; infinity for a fault that is no number."""
        if self.reason:
            return self.error / self.bound if self.bound else math.inf
        return 0.0

    def to_row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "right": self.passed,
            "error": self.error,
            "aten_error": self.aten_error,
            "bound": self.bound,
            **({"reason": self.reason} if self.reason else {}),
        }


@dataclass(frozen=True, slots=True)
class MeasuredAnswers:
    """A model's answers for one tensor: float64's, and the largest error of ATen in several runs."""

    aten: torch.Tensor
    exact: torch.Tensor | None
    largest_error: torch.Tensor | None = None
    """For each element; None if it was not measured."""

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        if self.exact is None and wide_dtype(self.aten.dtype) is None:
            return [self.aten]  # float64 itself
        return None if self.exact is None else [self.exact]

    def perturbed(self, seeds: Sequence[int], *steps: float) -> Iterator[list[list[torch.Tensor] | None]]:
        """Yield nothing: the measured errors include those of perturbed inputs."""
        del seeds, steps
        return iter(())

    def with_gaps(self) -> list[torch.Tensor] | None:
        return None

    def reruns(self) -> Iterator[list[torch.Tensor]]:
        """Yield the result of a run with the largest error everywhere, to the side of ATen's own."""
        if self.largest_error is not None:
            exact = self.aten if self.exact is None else self.exact
            signs = torch.where(to_float64(self.aten - exact).real < 0, -1, 1)
            yield [to_float64(exact) + signs * self.largest_error]

    @property
    def may_differ(self) -> float:
        """Return the share of elements that may differ in a tensor of integers; 0 for other dtypes."""
        if is_inexact(self.aten):
            return 0.0
        share = 0.0 if self.exact is None else float(elementwise_error(self.aten, self.exact))
        return MAX_ERROR_RATIO * max(share, 0.0 if self.largest_error is None else float(self.largest_error))


def compare(
    name: str,
    kernel: torch.Tensor,
    aten: torch.Tensor,
    answers: ReferenceAnswers,
    index: int = 0,
    *,
    reduction_length: float = 1.0,
    rounds_between: bool = True,
    may_differ: float = 0.0,
    reference_name: str = "ATen",
) -> TensorComparison:
    """Compare a tensor with ATen's; ``answers`` has it at ``index``."""
    if fault := _dtype_or_shape_fault(kernel, aten, reference_name):
        return TensorComparison(name, f"{name}: {fault}")
    try:
        figures = Comparison(
            kernel, aten, answers, index, name, reduction_length, reference_name=reference_name,
            rounds_between=rounds_between, may_differ=may_differ,
        ).check()  # fmt: skip
    except RejectedError as error:
        return _compared(name, str(error), error.verdict.figures)
    return _compared(name, "", figures)


def _compared(name: str, reason: str, figures: dict[str, Any]) -> TensorComparison:
    return TensorComparison(name, reason, *(float(figures.get(k, 0)) for k in ("kernel_error", "aten_error", "bound")))


def elementwise_error(rerun: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each element in float32, 0 where it is no number.

    Of integers it is one number: the share of elements that differ.
    """
    if not is_inexact(rerun):
        return (rerun != expected).float().mean().nan_to_num(0.0)
    return (to_float64(rerun) - to_float64(expected)).abs().nan_to_num(0.0, 0.0).float()


def float64_disagrees(aten: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether float64 gives another result than ATen, rather than the same with less error."""
    if aten.shape != exact.shape:
        return True
    if not is_inexact(aten):
        return False
    sizes = (_typical(to_float64(exact)), _typical(to_float64(aten)))
    return _typical(to_float64(aten) - to_float64(exact)) > MAX_FLOAT64_DEVIATION * max(sizes)


def is_inexact(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _typical(tensor: torch.Tensor) -> float:
    """Return the root mean square of a tensor's finite elements."""
    finite = tensor.abs()[torch.isfinite(tensor)]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _dtype_or_shape_fault(kernel: torch.Tensor, aten: torch.Tensor, reference: str) -> str:
    if kernel.dtype != aten.dtype:
        return f"dtype {_dtype_name(kernel.dtype)}, {reference} has {_dtype_name(aten.dtype)}"
    return f"shape {list(kernel.shape)}, {reference} has {list(aten.shape)}" if kernel.shape != aten.shape else ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
