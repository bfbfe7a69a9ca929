"""Compare a model's results with kernels to ATen's, by ATen's own error against float64.

Errors add up over a model, and where they end up in a single element is chance. So a tensor's
largest error and its typical error (root mean square) are compared with those of ATen in the same
dtype: a few times as much is allowed, plus two rounding steps. If that is not enough, ATen's own
error is measured again several times, from weights and inputs perturbed by a rounding step, and the
largest counts. Integers and booleans count by the share of elements that differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.tensors import to_float64
from opforge.judge.compare.numerics import ALLOWED_ROUNDING_STEPS, MAX_ERROR_RATIO, same_nonfinite

MAX_FLOAT64_DEVIATION = 0.25
"""Typical relative error of ATen beyond which the float64 run took another path of the model."""
_ALLOWED_FLOAT64_STEPS = 34.0
"""Allowed rounding steps in float64, which has no wider dtype to compare with."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The largest and the typical (root mean square) of some numbers."""

    largest: float = 0.0
    typical: float = 0.0

    @classmethod
    def of(cls, numbers: torch.Tensor) -> Magnitude:
        if not numbers.numel():
            return cls()
        return cls(float(numbers.max()), float(numbers.square().mean().sqrt()))

    def maximum(self, other: Magnitude) -> Magnitude:
        return Magnitude(max(self.largest, other.largest), max(self.typical, other.typical))


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor of a run with kernels, compared with ATen's and float64's."""

    name: str
    error: Magnitude
    aten_error: Magnitude
    allowed: Magnitude
    fault: str = ""
    """A non-numeric fault: shape, dtype, NaN."""

    @property
    def excess(self) -> float:
        """Return the ratio of the error to the allowed error; more than 1 is wrong."""
        if self.fault:
            return math.inf
        pairs = ((self.error.largest, self.allowed.largest), (self.error.typical, self.allowed.typical))
        return max(0.0 if e == 0 else math.inf if a == 0 else e / a for e, a in pairs)

    @property
    def passed(self) -> bool:
        return self.excess <= 1

    @property
    def reason(self) -> str:
        if self.fault:
            return f"{self.name}: {self.fault}"
        by_largest = self.allowed.largest * self.error.typical <= self.allowed.typical * self.error.largest
        kind = "largest" if by_largest else "typical"
        error, allowed, aten_error = (getattr(size, kind) for size in (self.error, self.allowed, self.aten_error))
        return f"{self.name}: {kind} error {error:.3g}, allowed {allowed:.3g} (ATen's own {aten_error:.3g})"

    def to_row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "right": self.passed,
            "error": self.error.largest,
            "aten_error": self.aten_error.largest,
            "bound": self.allowed.largest,
            "typical_error": self.error.typical,
            "typical_aten_error": self.aten_error.typical,
            "typical_bound": self.allowed.typical,
            **({"fault": self.fault} if self.fault else {}),
        }


def compare(
    name: str,
    kernel: torch.Tensor,
    aten: torch.Tensor,
    exact: torch.Tensor | None,
    measured_aten_error: Magnitude | None = None,
) -> TensorComparison:
    """Compare a tensor with ATen's; ``measured_aten_error`` was measured several times."""
    nothing = Magnitude()
    if (fault := _dtype_or_shape_fault(kernel, aten)) or (fault := _nonfinite_fault(kernel, aten, exact)):
        return TensorComparison(name, nothing, nothing, nothing, fault)
    error = error_of(kernel, aten, exact)
    aten_error = error_of(aten, aten, exact)
    aten_error = aten_error if measured_aten_error is None else aten_error.maximum(measured_aten_error)
    size, eps = Magnitude.of(_finite_magnitudes(aten if exact is None else exact)), rounding_tolerance(aten.dtype)
    allowed = Magnitude(
        MAX_ERROR_RATIO * aten_error.largest + eps * size.largest,
        MAX_ERROR_RATIO * aten_error.typical + eps * size.typical,
    )
    return TensorComparison(name, error, aten_error, allowed)


def error_of(actual: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor | None) -> Magnitude:
    """Return the error against float64, or against ATen if there is none, where both are finite."""
    expected = aten if exact is None else exact
    if not is_inexact(aten):
        return Magnitude.of((actual != expected).double().mean().reshape(1)) if actual.numel() else Magnitude()
    finite = torch.isfinite(actual) & torch.isfinite(expected)
    return Magnitude.of((to_float64(actual) - to_float64(expected)).abs()[finite])


def float64_disagrees(aten: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether float64 gives another result than ATen, rather than the same with less error."""
    if aten.shape != exact.shape:
        return True
    if not is_inexact(aten):
        return False
    return error_of(aten, aten, exact).typical > MAX_FLOAT64_DEVIATION * max(
        Magnitude.of(_finite_magnitudes(exact)).typical, Magnitude.of(_finite_magnitudes(aten)).typical
    )


def is_inexact(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the rounding error of a dtype that is always allowed, relative to a number."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    steps = _ALLOWED_FLOAT64_STEPS if dtype in (torch.float64, torch.complex128) else ALLOWED_ROUNDING_STEPS
    return steps * float(torch.finfo(dtype).eps)


def _dtype_or_shape_fault(kernel: torch.Tensor, aten: torch.Tensor) -> str:
    if kernel.dtype != aten.dtype:
        return f"dtype {_dtype_name(kernel.dtype)}, ATen has {_dtype_name(aten.dtype)}"
    return f"shape {list(kernel.shape)}, ATen has {list(aten.shape)}" if kernel.shape != aten.shape else ""


def _nonfinite_fault(kernel: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor | None) -> str:
    """Report NaN or infinities at places where ATen, or float64, has none, and the reverse."""
    if not is_inexact(aten):
        return ""
    unexpected = ~torch.isfinite(kernel) & ~same_nonfinite(to_float64(kernel), to_float64(aten))
    missing = torch.isfinite(kernel) & ~torch.isfinite(aten)
    if exact is not None:
        unexpected &= ~same_nonfinite(to_float64(kernel), to_float64(exact))
        missing &= ~torch.isfinite(exact)  # where only ATen overflowed on the way, a finite answer is correct
    count = int((unexpected | missing).sum())
    return f"{count} of {kernel.numel()} elements: NaN or inf not where ATen has it" if count else ""


def _finite_magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    wide = to_float64(tensor).abs()
    return wide[torch.isfinite(wide)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
