"""Compare results by the judge's bounds, and describe the first difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from opforge.cases.tensors import to_float64
from opforge.check.operator_call import OperatorCall
from opforge.judge.compare.numerics import Comparison, reduction_length
from opforge.judge.reference.aten import CallOutcome, Float64Answers, roughly_equal, widen
from opforge.judge.verdict import RejectedError
from opforge.runtime.trees import instances


@dataclass(frozen=True)
class Expectation:
    """The expected results of a call, which can be computed again in float64."""

    results: list[Any]
    call: OperatorCall
    compute: Callable[[OperatorCall], list[Any]]
    """Computes the results of a call; it may write to the call's tensors."""

    @cached_property
    def answers(self) -> _Answers:
        return _Answers(self)

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Compute the results again, from changed tensors if ``change`` is given."""
        try:
            with torch.no_grad():
                call = self.call if change is None else self.call.map_tensors(change)
                return CallOutcome([], self.compute(call.copy()))
        except Exception as error:  # noqa: BLE001  # many operators refuse float64
            return CallOutcome([], raised=error)

    def with_kept_inputs(self) -> Expectation:
        return self

    def rounds_internally(self) -> bool:
        """Whether float64 gives other results, as where a kernel takes its bytes for float32, or others each time."""
        tensors = list(instances(self.results, torch.Tensor))
        wide, again = (self.run(widen).tensors or [] for _ in range(2))
        if not len(wide) == len(again) == len(tensors):
            return True
        narrow = [w.to(t.dtype) for w, t in zip(wide, tensors, strict=True)]
        return not (roughly_equal(CallOutcome([], tensors), CallOutcome([], narrow)) and _steady(wide, again))


def _steady(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two runs in float64 differ by no more than the order of sums."""
    return all(
        a.shape == b.shape and torch.allclose(to_float64(a), to_float64(b), rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


@dataclass
class _Answers(Float64Answers):
    """Float64 answers without further runs: a result that changes from run to run is what checks look for."""

    def reruns(self) -> Iterator[list[torch.Tensor]]:
        return iter(())


def first_difference(expected: list[Any] | Expectation, actual: list[Any]) -> str:
    """Describe the first difference among several results; empty if there is none.

    Results given as a list must be equal. Those of an expectation have the judge's bounds.
    """
    results = expected.results if isinstance(expected, Expectation) else expected
    if len(results) != len(actual):
        return f"{len(actual)} results instead of {len(results)}"
    index = 0
    for position, (a, b) in enumerate(zip(results, actual, strict=True)):
        message = _type_difference(a, b)
        if not message and isinstance(a, torch.Tensor):
            comparable = a.layout == torch.strided and a.numel()
            message = _tensor_difference(expected, a.detach(), b.detach(), index) if comparable else ""
            index += 1
        if message:
            return message if len(results) == 1 else f"result {position}: {message}"
    return ""


def _type_difference(expected: Any, actual: Any) -> str:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if _comparable(expected) == _comparable(actual) else f"{actual!r} instead of {expected!r}"
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    return f"dtype {actual.dtype} instead of {expected.dtype}" if expected.dtype != actual.dtype else ""


def _comparable(value: Any) -> Any:
    return value if not isinstance(value, torch.Tensor) else tuple(value.shape)


def _tensor_difference(expected: list[Any] | Expectation, a: torch.Tensor, b: torch.Tensor, index: int) -> str:
    if not isinstance(expected, Expectation):
        differs = (a != b) & ~(a.isnan() & b.isnan())
        return _describe_first(a, b, differs) if bool(differs.any()) else ""
    length = reduction_length(expected.call.tensors, a)
    comparison = Comparison(b, a, expected.answers, index, "values", length, reference_name="the expected result")
    try:
        comparison.check(measure=False)
    except RejectedError as error:
        return str(error)
    return ""


def _describe_first(expected: torch.Tensor, actual: torch.Tensor, differs: torch.Tensor) -> str:
    count = int(differs.sum())
    index = [int(i) for i in differs.nonzero()[0]]
    position = f" at {index}" if index else ""
    wrong, right = actual[tuple(index)].item(), expected[tuple(index)].item()
    share = f" ({count} of {differs.numel()} elements differ)" if differs.numel() > 1 else ""
    return f"{format_number(wrong)} instead of {format_number(right)}{position}{share}"


def format_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
