"""Whether numbers are right: by ATen's own error against float64, not by taste.

A result that equals ATen's to the bit passes at once. Otherwise the operator is run in float64, and the kernel may be
off by a few times ATen's own error (the largest of several runs, where ATen is not deterministic) plus two rounding
steps of the dtype; float64 results, which have nothing wider to be held against, by thirty-four. Where that is not
enough, the case may be ill-conditioned (a sum that cancels): then the error that one rounding step in the inputs would
cause is allowed too, grown by the square root of the reduction's length, unless the operator jumps there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.materialise import WORD_DTYPES, flat_bytes
from opforge.judge.reference import MORE_SIGNS, SIGNS, Exact
from opforge.judge.verdict import NotRightError, Outcome

FACTOR = 4.0
"""How many times ATen's error a kernel may have."""
STEPS = 2.0
"""Rounding steps of the dtype that are always allowed."""
_RELATIVE_CAP = 8.0
"""ATen's relative error, as it is lent to other elements, counts up to so many steps."""
_WAVERING_CAP = 16.0
"""The same where ATen has no float64 form and answers differently each time."""
_RERUNS = 8
_MAGNIFIED = 2.0**20
"""How many times a rounding step of float64 inputs are moved by, which move by less than one otherwise; the effect is scaled back."""
_MANY = 1 << 25
"""Of more elements than these the errors are looked at on the CPU: in float64, and several times over, they take gigabytes."""

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
"""Relative and absolute, where the operator has no float64 form."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of the kernel's against ATen's, on the device on which both lie."""

    kernel: torch.Tensor
    aten: torch.Tensor
    exact: Exact
    index: int
    """Which of the tensors of the float64 run it is."""
    what: str
    reduction: float
    """How many input elements went into one output element, at most."""
    undecided: Callable[[], torch.Tensor | None] = lambda: None
    """Says where ATen has NaN because of infinities that it combines, and not because an input is NaN: infinite is right there too."""
    slack: float = 0.0
    """Rounding steps of the largest element that are allowed everywhere: gradients are made of results that were rounded."""
    by: str = "ATen"
    """Whose answers it is held against, as verdicts name it."""
    signed_zeros: bool = False
    """Whether zeros must have the signs of ATen's, where these do not depend on how one computes."""

    def check(self, *, measure: bool = True) -> dict[str, float]:
        """Return the figures of the errors; raises NotRightError when the result is wrong."""
        same = same_bytes(self.kernel, self.aten)
        if not (self.aten.is_floating_point() or self.aten.is_complex()):
            if not same:
                self._exactly_equal()
            return {"kernel_error": 0.0, "aten_error": 0.0, "bound": 0.0} if measure else {}
        if same:
            return self._own_error() if measure else {}
        if self.aten.device.type != "cpu" and self.aten.numel() > _MANY:
            return replace(self, kernel=self.kernel.cpu(), aten=self.aten.cpu()).check(measure=measure)
        figures = self._bounded(self._special_values())
        if self.signed_zeros:
            self._signs_of_zeros()
        return figures

    def _signs_of_zeros(self) -> None:
        """Refuse zeros of the other sign where ATen has the same one in float64 and in another layout: there it is no matter of order or rounding."""
        bad = _negative_zeros(self.kernel) ^ _negative_zeros(self.aten)
        bad &= (_wide(self.kernel) == 0) & (_wide(self.aten) == 0)
        for tensors in (self.exact.tensors, self.exact.spread()) if bad.any() else ():
            if (other := self._exact(tensors)) is None:
                return
            bad &= (other == 0) & (_negative_zeros(other) == _negative_zeros(self.aten))
        if bad.any():
            raise self._wrong(bad, f"the sign of zero is not {self.by}'s")

    def _exactly_equal(self) -> None:
        differ = self.kernel.cpu() != self.aten.cpu()  # a GPU does not compare all integers
        if differ.any():
            raise self._wrong(differ, "must be equal")

    def _own_error(self) -> dict[str, float]:
        """Return the figures where the kernel's bits are ATen's: its error is ATen's own."""
        exact = self._exact(self.exact.tensors)
        if exact is None or not exact.numel():
            rtol, atol = _tolerance(self.aten.dtype)
            return {"kernel_error": 0.0, "bound": atol, "rtol": rtol, "atol": atol} if exact is None else {}
        error, eps = (_wide(self.aten) - exact).abs().nan_to_num(0.0, 0.0), _step(self.aten.dtype)[0]
        worst = int(error.argmax())
        largest = float(error.reshape(-1)[worst])
        bound = FACTOR * largest + STEPS * eps * float(exact.abs().nan_to_num(0.0, 0.0).reshape(-1)[worst])
        return {"kernel_error": largest, "aten_error": largest, "bound": bound}

    def _special_values(self) -> torch.Tensor:
        """Check NaN and inf, and return the mask of elements that are to be held against the bound."""
        k, a = _wide(self.kernel), _wide(self.aten)
        both = torch.isfinite(a) & torch.isfinite(k)
        if both.all():
            return both
        bad = ~both & ~_same_special(k, a)
        if bad.any() and not a.is_complex() and (undecided := self.undecided()) is not None:
            bad &= ~(undecided.to(a.device) & torch.isnan(a) & torch.isinf(k))
        if bad.any():
            bad &= ~self._nearer_than_aten(k)
        if bad.any():
            bad &= torch.isfinite(k) | ~self._unstable()
        if bad.any():
            raise self._wrong(bad, f"NaN or inf not where {self.by} has it")
        return both

    def _nearer_than_aten(self, kernel: torch.Tensor) -> torch.Tensor:
        """Return where the kernel has the float64 answer, to a few roundings, and ATen has it not: it overflowed inside."""
        exact = self._exact(self.exact.tensors)
        if exact is None:
            return torch.zeros_like(kernel, dtype=torch.bool)
        rounded = _wide(exact.to(self.aten.dtype))
        near = (kernel - rounded).abs() <= (FACTOR + STEPS) * _step(self.aten.dtype)[0] * rounded.abs()
        return (torch.isfinite(kernel) & torch.isfinite(rounded) & near) | _same_special(kernel, rounded)

    def _unstable(self) -> torch.Tensor:
        """Return where the float64 answer is infinite or NaN, and another one when inputs move by a rounding step: infinity times nearly zero."""
        unstable = torch.zeros(self.aten.shape, dtype=torch.bool, device=self.aten.device)
        first = self._exact(self.exact.tensors)
        for sign in SIGNS if first is not None and not first.is_complex() else ():
            moved = self._exact(self.exact.perturbed(torch.finfo(torch.float32).eps, sign))
            if moved is not None:
                unstable |= ~torch.isfinite(first) & ~torch.isfinite(moved) & ~_same_special(first, moved)
        return unstable

    def _bounded(self, finite: torch.Tensor) -> dict[str, float]:
        exact = self._exact(self.exact.tensors)
        whole = bool(finite.all())  # a mask costs more than all the rest

        def chosen(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(-1) if whole else t[finite]

        if exact is None or not torch.isfinite(r := chosen(exact)).all():
            return self._tolerated(finite)
        k, a = chosen(_wide(self.kernel)), chosen(_wide(self.aten))
        eps, tiny = _step(self.aten.dtype)
        error, aten_error, size = (k - r).abs(), (a - r).abs(), r.abs()
        cap = _RELATIVE_CAP * eps
        if self.aten.dtype in (torch.float64, torch.complex128):
            relative = torch.tensor(cap, device=r.device)  # nothing wider to see ATen's own error by
        else:
            relative = (
                torch.where(size > 0, aten_error / size, 0).amax().clamp(max=cap)
                if len(r)
                else torch.zeros_like(r.abs())
            )
        allowed = FACTOR * torch.maximum(aten_error, relative * size) + STEPS * eps * size + tiny
        if self.slack and len(r):
            allowed = allowed + self.slack * eps * max(1.0, _largest(size))
        if (error > allowed).any():
            aten_error = torch.maximum(aten_error, chosen(self._spread(exact)))
            own = torch.maximum(allowed, FACTOR * aten_error)
            allowed = own + chosen(self._conditioning(exact, eps, SIGNS))
            if (error > allowed).any():
                allowed = torch.maximum(allowed, own + chosen(self._conditioning(exact, eps, MORE_SIGNS)))
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
            reason = f"error {_largest(error[worst]):.3g}, allowed {_largest(allowed[worst]):.3g} ({self.by}'s own {_largest(aten_error[worst]):.3g})"
            raise self._wrong(where, reason, **figures)
        return figures

    def _spread(self, exact: torch.Tensor) -> torch.Tensor:
        """Return ATen's largest error over several runs, which differs from its first where ATen is not deterministic.

        There, no element is taken to be steadier than those beside it in its row: some are lucky in all of the runs.
        """
        first = _wide(self.aten)
        largest, apart = torch.zeros_like(exact.abs()), torch.zeros_like(exact.abs())
        for again in self._reruns(exact.shape):
            largest = torch.maximum(largest, torch.nan_to_num((again - exact).abs()))
            apart = torch.maximum(apart, torch.nan_to_num((again - first).abs(), posinf=0.0))
        return torch.maximum(largest, _of_its_row(apart))

    def _reruns(self, shape: torch.Size) -> Iterator[torch.Tensor]:
        """Yield further answers of ATen's to the same call, in float64."""
        for _ in range(_RERUNS):
            again = self.exact.call.run().tensors
            if again is None or again[self.index].shape != shape:
                return
            yield self._near(again[self.index])

    def _conditioning(self, exact: torch.Tensor, eps: float, signs: Sequence[int]) -> torch.Tensor:
        """Return the error that a rounding of the inputs, in the precision that ATen computes in, may cause."""
        inner = min(eps, torch.finfo(torch.float32).eps)
        unseen = inner < torch.finfo(torch.float32).eps  # ATen's own error in float64, for which this stands in
        magnified, factor = (_MAGNIFIED, FACTOR * FACTOR) if unseen else (1.0, FACTOR)
        squares = torch.zeros_like(exact.abs())
        nearest = torch.zeros_like(squares)
        for sign in signs:
            far, near = (
                self._exact(self.exact.perturbed(step, sign)) for step in (magnified * inner, magnified * inner / 16)
            )
            if far is None or near is None:
                return torch.zeros_like(squares)
            squares += (far - exact).abs().square()
            nearest = torch.maximum(nearest, (near - exact).abs())
        typical = torch.sqrt(squares / len(signs))
        smooth = nearest <= typical / 4  # a smooth function moves less when its input does; one that jumps does not
        return torch.where(~smooth, 0, factor * math.sqrt(self.reduction) * typical / magnified)

    def _tolerated(self, finite: torch.Tensor) -> dict[str, float]:
        k, a = _wide(self.kernel)[finite], _wide(self.aten)[finite]
        rtol, atol = _tolerance(self.aten.dtype)
        error, allowed = (k - a).abs(), atol + rtol * a.abs()
        if (error > allowed).any():
            allowed = allowed + self._wavering(a, finite)
        figures = {"kernel_error": _largest(error), "bound": _largest(allowed), "rtol": rtol, "atol": atol}
        if (bad := error > allowed).any():
            where = torch.zeros_like(finite)
            where[finite] = bad
            raise self._wrong(where, f"off by more than rtol {rtol:g}, atol {atol:g} (no float64 form)", **figures)
        return figures

    def _wavering(self, aten: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Return how far ATen's own answers may lie apart where it is not deterministic: as far as seen, and lent to other elements.

        Of millions of elements some were lucky in all of the few runs: none is taken to be steadier than those beside it in its row,
        which sum up what is alike in size, nor than they are on the whole.
        """
        first = _wide(self.aten)
        spread = torch.zeros_like(first.abs())
        for again in self._reruns(finite.shape):
            spread = torch.maximum(spread, torch.nan_to_num((again - first).abs(), posinf=0.0))
        spread, size = _of_its_row(spread)[finite], aten.abs()
        relative = torch.where(size > 0, spread / size, 0).amax().clamp(max=_WAVERING_CAP * _step(self.aten.dtype)[0])
        usual = spread.square().mean().sqrt() if len(spread) else spread
        return FACTOR * torch.maximum(torch.maximum(spread, usual), relative * size)

    def _near(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another answer of ATen's in float64, where this one lies."""
        return _wide(tensor.detach().to(self.aten.device))

    def _exact(self, tensors: list[torch.Tensor] | None) -> torch.Tensor | None:
        if tensors is None or self.index >= len(tensors):
            return None
        found = tensors[self.index].to(self.aten.device)
        return found if found.shape == self.aten.shape and (found.is_floating_point() or found.is_complex()) else None

    def _wrong(self, where: torch.Tensor, reason: str, **figures: Any) -> NotRightError:
        count, total = int(where.sum()), where.numel()
        at = where.nonzero()[0].tolist()
        got, expected = self.kernel[tuple(at)].item(), self.aten[tuple(at)].item()
        text = f"{self.what}: {count} of {total} elements: {reason}; first at {at}: got {got!r}, {self.by} has {expected!r}"
        return NotRightError(Outcome.WRONG, text, **figures)


def _of_its_row(spread: torch.Tensor) -> torch.Tensor:
    """Return for each element the largest value of its row."""
    return spread.amax(-1, keepdim=True).expand_as(spread) if spread.dim() and spread.numel() else spread


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    if left is right:
        return True
    words = WORD_DTYPES.get(left.element_size())
    if words is None or not (_as_stored(left) and _as_stored(right)):
        return bool(torch.equal(flat_bytes(left), flat_bytes(right)))
    return bool(torch.equal(left.detach().view(words), right.detach().view(words)))


def _as_stored(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in its memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _negative_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is -0.0; of complex numbers, where the real part is."""
    wide = _wide(tensor)
    return (wide == 0) & torch.signbit(wide.real if wide.is_complex() else wide)


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    return TOLERANCES.get(dtype, (1.3e-6, 1e-5))


def _same_special(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where both are NaN, or both infinite with one sign; of complex numbers, where neither is finite."""
    if left.is_complex():
        return ~torch.isfinite(left) & ~torch.isfinite(right)
    return (torch.isnan(left) & torch.isnan(right)) | (torch.isinf(left) & (left == right))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _step(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return info.eps, info.tiny


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0
