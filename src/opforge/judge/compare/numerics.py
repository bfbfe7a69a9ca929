"""Decide whether numbers are right, from their error and ATen's own error against float64.

A result with the same bits as ATen's passes at once. Otherwise the operator is run in float64. With
``e`` ATen's error at an element, ``r`` its largest relative error (8 rounding steps at most) and
``x`` the float64 result, the kernel's error may be ``4 max(e, r |x|)`` plus two rounding steps of
``x``. Float64 results have no wider dtype to compare with: ``r`` is 8 steps for them, which makes 34
steps. Where ATen is not deterministic, ``e`` is the largest of several runs. Where that is not
enough, the case may be ill-conditioned (a sum that cancels). Then the error that one rounding step
in the inputs would cause is allowed too, times the square root of the reduction's length, unless
the operator jumps there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from opforge.cases.tensors import same_bytes, to_float64
from opforge.judge.reference.aten import EXTRA_PERTURBATION_SEEDS, PERTURBATION_SEEDS
from opforge.judge.verdict import RejectedError, VerdictKind

MAX_ERROR_RATIO = 4.0
"""Multiple of ATen's error that a kernel may have."""
ALLOWED_ROUNDING_STEPS = 2.0
"""Rounding steps of the dtype that are always allowed."""
_MAX_RELATIVE_ERROR_STEPS = 8.0
"""Cap, in rounding steps, on ATen's relative error where it is applied to other elements."""
_MAX_NONDETERMINISM_STEPS = 16.0
"""The same where ATen has no float64 form and answers differently each time."""
_MAX_ATEN_RERUNS = 8
_FLOAT64_PERTURBATION_FACTOR = 2.0**20
"""Factor on the rounding step by which float64 inputs are moved; the effect is scaled back.

Otherwise they would move by less than one step.
"""
_MAX_GPU_COMPARE_ELEMENTS = 1 << 25
"""Above this many elements, errors are computed on the CPU.

In float64, and several times over, they take gigabytes.
"""

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.complex128: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex32: (1e-3, 1e-5),
    torch.float8_e4m3fn: (1.25e-1, 2e-3),
    torch.float8_e5m2: (2.5e-1, 2e-5),
}
"""Relative and absolute tolerance, where the operator has no float64 form."""


class ReferenceAnswers(Protocol):
    """The reference's answers besides the one to compare with, each a list of tensors."""

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        """Return the float64 answer; None if there is none."""
        ...

    def perturbed(self, seeds: Sequence[int], *steps: float) -> Iterator[list[list[torch.Tensor] | None]]:
        """Yield for each seed the float64 answers after each input element moved by about each step of itself."""
        ...

    def with_gaps(self) -> list[torch.Tensor] | None:
        """Return the answer to inputs with gaps between elements."""
        ...

    def reruns(self) -> Iterator[list[torch.Tensor]]:
        """Yield the answers to further runs, which show how far the reference's own error reaches."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of the kernel's and the one of ATen's to compare it with, on the same device."""

    kernel: torch.Tensor
    aten: torch.Tensor
    exact: ReferenceAnswers
    tensor_index: int
    """Index of the tensor in the float64 run."""
    label: str
    reduction_length: float
    """Maximum number of input elements that go into one output element."""
    infinity_allowed: Callable[[], torch.Tensor | None] = lambda: None
    """Returns where ATen has NaN from combining infinities, and not from NaN inputs.

    Infinity is right there too.
    """
    slack_steps: float = 0.0
    """Rounding steps of the largest element that are allowed everywhere.

    Gradients are computed from rounded results.
    """
    reference_name: str = "ATen"
    """Name of the reference in verdicts."""
    zero_signs_matter: bool = False
    """Whether zeros must have ATen's signs, where these do not depend on the computation."""
    rounds_between: bool = False
    """Whether intermediate results are rounded to the dtype: a program of several operators."""
    may_differ: float = 0.0
    """Share of the elements that may differ if they are integers or booleans.

    In a model they may depend on rounded numbers, as an argmax does.
    """

    def check(self, *, measure: bool = True) -> dict[str, float]:
        """Return the figures of the errors; raises RejectedError if the result is wrong."""
        same = same_bytes(self.kernel, self.aten)
        if not (self.aten.is_floating_point() or self.aten.is_complex()):
            share = 0.0 if same else self._check_equal()
            return {"kernel_error": share, "aten_error": 0.0, "bound": self.may_differ} if measure or share else {}
        if same:
            return self._aten_error_figures() if measure else {}
        if self.aten.device.type != "cpu" and self.aten.numel() > _MAX_GPU_COMPARE_ELEMENTS:
            return replace(self, kernel=self.kernel.cpu(), aten=self.aten.cpu()).check(measure=measure)
        figures = self._check_error_bound(self._check_special_values())
        if self.zero_signs_matter:
            self._check_zero_signs()
        return figures

    def _check_zero_signs(self) -> None:
        """Reject zeros of the other sign where ATen's sign does not depend on order or rounding.

        There ATen has the same sign in float64 and in another layout.
        """
        bad = _negative_zeros(self.kernel) ^ _negative_zeros(self.aten)
        bad &= (to_float64(self.kernel) == 0) & (to_float64(self.aten) == 0)
        for tensors in (self.exact.tensors, self.exact.with_gaps()) if bad.any() else ():
            if (other := self._exact_tensor(tensors)) is None:
                return
            bad &= (other == 0) & (_negative_zeros(other) == _negative_zeros(self.aten))
        if bad.any():
            raise self._wrong(bad, f"the sign of zero is not {self.reference_name}'s")

    def _check_equal(self) -> float:
        """Return the share of elements that differ."""
        differ = self.kernel.cpu() != self.aten.cpu()  # a GPU cannot compare all integer dtypes
        share = float(differ.double().mean()) if differ.numel() else 0.0
        if share > self.may_differ:
            allowed = f"at most {self.may_differ:.3g} of them may differ" if self.may_differ else "must be equal"
            raise self._wrong(differ, allowed)
        return share

    def _aten_error_figures(self) -> dict[str, float]:
        """Return the figures where the kernel has ATen's bits: its error is ATen's own."""
        exact = self._exact_tensor(self.exact.tensors)
        if exact is None or not exact.numel():
            rtol, atol = _tolerance(self.aten.dtype)
            return {"kernel_error": 0.0, "bound": atol, "rtol": rtol, "atol": atol} if exact is None else {}
        error, eps = (to_float64(self.aten) - exact).abs().nan_to_num(0.0, 0.0), _eps_and_tiny(self.aten.dtype)[0]
        worst = int(error.argmax())
        largest = float(error.reshape(-1)[worst])
        bound = MAX_ERROR_RATIO * largest + ALLOWED_ROUNDING_STEPS * eps * float(
            exact.abs().nan_to_num(0.0, 0.0).reshape(-1)[worst]
        )
        return {"kernel_error": largest, "aten_error": largest, "bound": bound}

    def _check_special_values(self) -> torch.Tensor:
        """Check NaN and inf; return the mask of elements to compare with the bound."""
        k, a = to_float64(self.kernel), to_float64(self.aten)
        both_finite = torch.isfinite(a) & torch.isfinite(k)
        if both_finite.all():
            return both_finite
        bad = ~both_finite & ~same_nonfinite(k, a)
        if bad.any() and not a.is_complex() and (undecided := self.infinity_allowed()) is not None:
            bad &= ~(undecided.to(a.device) & torch.isnan(a) & torch.isinf(k))
        if bad.any():
            bad &= ~self._matches_float64(k)
        if bad.any():
            bad &= torch.isfinite(k) | ~self._unstable()
        if bad.any():
            raise self._wrong(bad, f"NaN or inf not where {self.reference_name} has it")
        return both_finite

    def _matches_float64(self, kernel: torch.Tensor) -> torch.Tensor:
        """Return where the kernel has the float64 answer, up to rounding, and ATen overflowed."""
        exact = self._exact_tensor(self.exact.tensors)
        if exact is None:
            return torch.zeros_like(kernel, dtype=torch.bool)
        rounded = to_float64(exact.to(self.aten.dtype))
        near = (kernel - rounded).abs() <= (MAX_ERROR_RATIO + ALLOWED_ROUNDING_STEPS) * _eps_and_tiny(self.aten.dtype)[
            0
        ] * rounded.abs()
        return (torch.isfinite(kernel) & torch.isfinite(rounded) & near) | same_nonfinite(kernel, rounded)

    def _unstable(self) -> torch.Tensor:
        """Return where the float64 answer is not finite and depends on rounding of the inputs.

        An example is infinity times nearly zero.
        """
        unstable = torch.zeros(self.aten.shape, dtype=torch.bool, device=self.aten.device)
        first = self._exact_tensor(self.exact.tensors)
        seeds = PERTURBATION_SEEDS if first is not None and not first.is_complex() else ()
        for (answer,) in self.exact.perturbed(seeds, torch.finfo(torch.float32).eps):
            moved = self._exact_tensor(answer)
            if moved is not None:
                unstable |= ~torch.isfinite(first) & ~torch.isfinite(moved) & ~same_nonfinite(first, moved)
        return unstable

    def _check_error_bound(self, finite: torch.Tensor) -> dict[str, float]:
        exact = self._exact_tensor(self.exact.tensors)
        all_finite = bool(finite.all())  # masking costs more than all the rest

        def chosen(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(-1) if all_finite else t[finite]

        if exact is None or not torch.isfinite(r := chosen(exact)).all():
            return self._check_tolerance(finite)
        k, a = chosen(to_float64(self.kernel)), chosen(to_float64(self.aten))
        eps, tiny = _eps_and_tiny(self.aten.dtype)
        error, aten_error, size = (k - r).abs(), (a - r).abs(), r.abs()
        cap = _MAX_RELATIVE_ERROR_STEPS * eps
        if self.aten.dtype in (torch.float64, torch.complex128):
            relative = torch.tensor(cap, device=r.device)  # no wider dtype to show ATen's own error
        else:
            relative = (
                torch.where(size > 0, aten_error / size, 0).amax().clamp(max=cap)
                if len(r)
                else torch.zeros_like(r.abs())
            )
        allowed = (
            MAX_ERROR_RATIO * torch.maximum(aten_error, relative * size) + ALLOWED_ROUNDING_STEPS * eps * size + tiny
        )
        if self.slack_steps and len(r):
            allowed = allowed + self.slack_steps * eps * max(1.0, _largest(size))
        if (error > allowed).any():
            aten_error = torch.maximum(aten_error, chosen(self._largest_rerun_error(exact)))
            aten_bound = torch.maximum(allowed, MAX_ERROR_RATIO * aten_error)
            allowed = aten_bound + chosen(self._conditioning(exact, eps, PERTURBATION_SEEDS))
            if (error > allowed).any():
                allowed = torch.maximum(
                    allowed, aten_bound + chosen(self._conditioning(exact, eps, EXTRA_PERTURBATION_SEEDS))
                )
        figures = {
            "kernel_error": _largest(error),
            "aten_error": _largest(aten_error),
            "bound": _largest(allowed[error.argmax()]) if len(r) else 0.0,
        }
        if (bad := error > allowed).any():
            where = torch.zeros_like(finite)
            where[finite] = bad
            worst = int((error / allowed).argmax())
            figures = {
                "kernel_error": _largest(error[worst]),
                "aten_error": _largest(aten_error[worst]),
                "bound": _largest(allowed[worst]),
            }
            reason = (
                f"error {figures['kernel_error']:.3g}, allowed {figures['bound']:.3g} "
                f"({self.reference_name}'s own {figures['aten_error']:.3g})"
            )
            raise self._wrong(where, reason, worst=finite.nonzero()[worst], **figures)
        return figures

    def _largest_rerun_error(self, exact: torch.Tensor) -> torch.Tensor:
        """Return ATen's largest error over several runs; they differ if it is not deterministic.

        No element counts as more stable than the others in its row: some agree in all runs by chance.
        """
        first = to_float64(self.aten)
        largest_error, largest_change = torch.zeros_like(exact.abs()), torch.zeros_like(exact.abs())
        for rerun in self._reruns(exact.shape):
            largest_error = torch.maximum(largest_error, torch.nan_to_num((rerun - exact).abs()))
            largest_change = torch.maximum(largest_change, torch.nan_to_num((rerun - first).abs(), posinf=0.0))
        return torch.maximum(largest_error, _row_maxima(largest_change))

    def _reruns(self, shape: torch.Size) -> Iterator[torch.Tensor]:
        """Yield ATen's answers to further runs of the same call, converted to float64."""
        for tensors in itertools.islice(self.exact.reruns(), _MAX_ATEN_RERUNS):
            if tensors[self.tensor_index].shape != shape:
                return
            yield self._in_float64(tensors[self.tensor_index])

    def _conditioning(self, exact: torch.Tensor, eps: float, seeds: Sequence[int]) -> torch.Tensor:
        """Return the error that rounding of the inputs in ATen's internal precision may cause."""
        inner = eps if self.rounds_between else min(eps, torch.finfo(torch.float32).eps)
        is_float64 = inner < torch.finfo(torch.float32).eps  # float64: this replaces ATen's own error
        magnified, factor = (
            (_FLOAT64_PERTURBATION_FACTOR, MAX_ERROR_RATIO * MAX_ERROR_RATIO) if is_float64 else (1.0, MAX_ERROR_RATIO)
        )
        squares = torch.zeros_like(exact.abs())
        nearest = torch.zeros_like(squares)
        for answers in self.exact.perturbed(seeds, magnified * inner, magnified * inner / 16):
            far, near = map(self._exact_tensor, answers)
            if far is None or near is None:
                return torch.zeros_like(squares)
            squares += (far - exact).abs().square()
            nearest = torch.maximum(nearest, (near - exact).abs())
        typical = torch.sqrt(squares / len(seeds))
        smooth = nearest <= typical / 4  # smooth: a smaller step of the inputs has a smaller effect
        return torch.where(~smooth, 0, factor * math.sqrt(self.reduction_length) * typical / magnified)

    def _check_tolerance(self, finite: torch.Tensor) -> dict[str, float]:
        k, a = to_float64(self.kernel)[finite], to_float64(self.aten)[finite]
        rtol, atol = _tolerance(self.aten.dtype)
        error, allowed = (k - a).abs(), atol + rtol * a.abs()
        if (error > allowed).any():
            allowed = allowed + self._nondeterminism_allowance(a, finite)
        if not len(error):
            return {"kernel_error": 0.0, "bound": 0.0, "rtol": rtol, "atol": atol}
        bad = error > allowed
        worst = int((error / allowed if bad.any() else error).argmax())
        figures = {"kernel_error": float(error[worst]), "bound": float(allowed[worst]), "rtol": rtol, "atol": atol}
        if bad.any():
            where = torch.zeros_like(finite)
            where[finite] = bad
            reason = (
                f"error {figures['kernel_error']:.3g}, allowed {figures['bound']:.3g} "
                f"(rtol {rtol:g}, atol {atol:g}; no float64 form)"
            )
            raise self._wrong(where, reason, worst=finite.nonzero()[worst], **figures)
        return figures

    def _nondeterminism_allowance(self, aten: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Return how far apart ATen's own answers may be where it is not deterministic.

        The spread that was seen is applied to other elements too: of millions of elements, some
        agree in all of the few runs by chance. No element counts as more stable than the others in its
        row, which sum values of similar size, nor than the average element.
        """
        first = to_float64(self.aten)
        spread = torch.zeros_like(first.abs())
        for rerun in self._reruns(finite.shape):
            spread = torch.maximum(spread, torch.nan_to_num((rerun - first).abs(), posinf=0.0))
        spread, size = _row_maxima(spread)[finite], aten.abs()
        relative = (
            torch.where(size > 0, spread / size, 0)
            .amax()
            .clamp(max=_MAX_NONDETERMINISM_STEPS * _eps_and_tiny(self.aten.dtype)[0])
        )
        root_mean_square = spread.square().mean().sqrt() if len(spread) else spread
        return MAX_ERROR_RATIO * torch.maximum(torch.maximum(spread, root_mean_square), relative * size)

    def _in_float64(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another answer of ATen's in float64, on this answer's device."""
        return to_float64(tensor.detach().to(self.aten.device))

    def _exact_tensor(self, tensors: list[torch.Tensor] | None) -> torch.Tensor | None:
        if tensors is None or self.tensor_index >= len(tensors):
            return None
        exact = tensors[self.tensor_index].to(self.aten.device)
        return exact if exact.shape == self.aten.shape and (exact.is_floating_point() or exact.is_complex()) else None

    def _wrong(
        self, where: torch.Tensor, reason: str, *, worst: torch.Tensor | None = None, **figures: Any
    ) -> RejectedError:
        """Return the verdict; it shows the worst element, to which the figures belong, or else the first."""
        count, total = int(where.sum()), where.numel()
        at = (where.nonzero()[0] if worst is None else worst).tolist()
        got, expected = self.kernel[tuple(at)].item(), self.aten[tuple(at)].item()
        text = (
            f"{self.label}: {count} of {total} elements: {reason}; "
            f"{'first' if worst is None else 'worst'} at {at}: got {got!r}, {self.reference_name} has {expected!r}"
        )
        return RejectedError(VerdictKind.WRONG, text, **figures)


def reduction_length(inputs: Iterable[torch.Tensor], result: torch.Tensor) -> float:
    """Return how many input elements go into one element of a result, at most."""
    sizes = sorted((t.numel() for t in inputs if t.is_floating_point() or t.is_complex()), reverse=True)
    if not sizes or not result.numel():
        return 1.0
    product = math.sqrt(sizes[0] * sizes[1] / result.numel()) if len(sizes) > 1 else 1.0
    return max(1.0, float(sizes[0] / result.numel()), product)


def _row_maxima(spread: torch.Tensor) -> torch.Tensor:
    """Return for each element the largest value of its row."""
    return spread.amax(-1, keepdim=True).expand_as(spread) if spread.dim() and spread.numel() else spread


def _negative_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is -0.0; for complex numbers, where the real part is."""
    wide = to_float64(tensor)
    return (wide == 0) & torch.signbit(wide.real if wide.is_complex() else wide)


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    return TOLERANCES.get(dtype, (1.3e-6, 1e-5))


def same_nonfinite(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where both are NaN or the same infinity; if complex, where neither is finite."""
    if left.is_complex():
        return ~torch.isfinite(left) & ~torch.isfinite(right)
    return (torch.isnan(left) & torch.isnan(right)) | (torch.isinf(left) & (left == right))


def _eps_and_tiny(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return info.eps, info.tiny


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0
