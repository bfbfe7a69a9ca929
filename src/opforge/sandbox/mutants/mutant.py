"""A mutant in a worker: ATen's function, made wrong in one way.

Every call is first made by ATen, so that dtype, shape, strides, identity and errors are right. Then
wrong numbers replace the right ones: in new memory for new results, in place for written ones. So a
mutant fails only by its numbers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from opforge.cases.tensors import to_float64
from opforge.ops import Operator
from opforge.sandbox.mutants.aten_call import AtenCall, CallResult, Function, copy_arguments, result_of
from opforge.sandbox.mutants.mutations import mutation_for, shares_storage
from opforge.sandbox.mutants.probes import probes

_MAX_PROBED_CASES = 40
"""Cases on which probes are tried before a mutant counts as right there."""
_MAX_ROUNDING_STEPS = 4
"""Rounding steps within which two numbers are equal, for example after summing in another order."""


class MutantEffect(enum.StrEnum):
    """What a mutant has shown so far."""

    VOID = "void"
    """It is right: neither cases nor probes distinguish it from ATen."""
    SAME = "same"
    """A probe distinguishes it from ATen, but no case did."""
    CHANGED = "changed"
    """Its answer to a case differed from ATen's."""


class Mutant:
    """An operator's mutant; ``effect`` summarises all its calls."""

    def __init__(self, op: Operator, aten: Function, name: str) -> None:
        self._op = op
        self._aten = aten
        self._name = name
        self._mutate = mutation_for(name)
        self._probes = _MAX_PROBED_CASES
        self.effect = MutantEffect.VOID

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rng = torch.get_rng_state() if self._op.is_random else None
        before = copy_arguments(self._op, args, kwargs)
        result = self._aten(*args, **kwargs)
        after = torch.get_rng_state() if self._op.is_random else None
        call = AtenCall(self._op, self._aten, *before, result_of(self._op, result, args, kwargs), rng)
        if not self._op.mutates and any(shares_storage(t, call.inputs) for t in call.truth.tensors):
            call = replace(call, view=True)
        answer = self._wrong(call)
        if answer is not None:
            self.effect = MutantEffect.CHANGED
            result = replace_values(result, call.truth, answer)
        elif self.effect is MutantEffect.VOID:
            self._probe(call)
        if after is not None:
            torch.set_rng_state(after)
        return result

    def _wrong(self, call: AtenCall) -> CallResult | None:
        """Return the mutant's answer; None if it is the true one."""
        try:
            answer = self._mutate(call)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None  # for example a dtype that its arithmetic lacks
        if (
            answer is None
            or len(answer.new_values) != len(call.truth.new_values)
            or len(answer.written) != len(call.truth.written)
        ):
            return None
        fitted = _fitted(call, answer)
        pairs = zip(call.truth.values, fitted.values, strict=True)
        if self._name == "control":
            return fitted
        return fitted if any(differs(t, v) for t, v in pairs) else None

    def _probe(self, call: AtenCall) -> None:
        if self._probes <= 0:
            return
        self._probes -= 1
        for probe in probes(call, self._name):
            if self._wrong(probe) is not None:
                self.effect = MutantEffect.SAME
                return


def _fitted(call: AtenCall, answer: CallResult) -> CallResult:
    """Return an answer with the true value wherever the wrong one cannot replace it."""
    inputs = call.inputs
    fresh = [_fresh(t, v, inputs) for t, v in zip(call.truth.new_values, answer.new_values, strict=True)]
    written = [v if v.shape == t.shape else t for t, v in zip(call.truth.written, answer.written, strict=True)]
    return CallResult(fresh, written)


def _fresh(truth: Any, value: Any, inputs: list[torch.Tensor]) -> Any:
    if not isinstance(truth, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value if type(value) is type(truth) else truth
    if shares_storage(truth, inputs):  # a view; only another view of the same memory can replace it
        return value if shares_storage(value, [truth]) else truth
    return truth if value is truth else _placed(truth, value)


def replace_values(result: Any, truth: CallResult, answer: CallResult) -> Any:
    """Replace true values by wrong ones and return the result, otherwise as ATen returned it."""
    for target, value in zip(truth.written, answer.written, strict=True):
        if value is not target:
            target.copy_(value)
    return _rebuilt(result, truth.written, iter(answer.new_values))


def _placed(truth: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value in new memory with the layout of ATen's."""
    if value.shape != truth.shape or value.dtype != truth.dtype:
        return value.clone()
    return torch.empty_like(truth).copy_(value)


def _rebuilt(tree: Any, written: list[torch.Tensor], fresh: Iterator[Any]) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)(_rebuilt(v, written, fresh) for v in tree)
    return tree if any(tree is w for w in written) else next(fresh)


def differs(truth: Any, value: Any) -> bool:
    """Whether two values differ by more than rounding."""
    if not isinstance(truth, torch.Tensor) or not isinstance(value, torch.Tensor):
        return truth != value and not (_is_nan(truth) and _is_nan(value))
    if truth.shape != value.shape or truth.dtype != value.dtype:
        return True
    if not (truth.is_floating_point() or truth.is_complex()):
        return not torch.equal(truth, value)
    info, truth, value = torch.finfo(truth.dtype), to_float64(truth), to_float64(value)
    return not torch.allclose(truth, value, rtol=_MAX_ROUNDING_STEPS * info.eps, atol=info.tiny, equal_nan=True)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
