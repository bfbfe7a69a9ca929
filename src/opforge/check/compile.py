"""Check torch.compile on an operator and its public functions: no graph breaks, any size."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import _dynamo as dynamo

from opforge.check import fixes
from opforge.check.differences import Expectation, first_difference
from opforge.check.findings import KIND_CONTENTS, KIND_TRACING, Findings, failed, skipped
from opforge.check.operator_call import OperatorCall, flat_results
from opforge.check.subject import Subject, attempt, describe_error
from opforge.frames import is_user_file
from opforge.sandbox.guest.global_state import seed_generator

_OPERATOR_NAME = "torch.ops.{}"


def check(subject: Subject) -> Findings:
    """Yield graph breaks, results that change when compiled, and recompilation for new sizes."""
    if subject.returns and not any("Tensor" in str(result.type) for result in subject.returns):
        yield skipped("compile", "it returns no tensor, and torch.compile traces operators that return tensors only")
        return
    random = subject.is_random()
    function = _OPERATOR_NAME.format(subject.name.replace("::", "."))
    yield from _check_function(subject, function, subject.overload, random=random)
    for public in subject.functions:
        if _gives_same_results(public, subject, random=random):
            yield from _check_function(subject, f"{public.__module__}.{public.__name__}", public, random=random)


def _gives_same_results(function: Callable[..., Any], subject: Subject, *, random: bool) -> bool:
    """Whether a function with the operator's name gives the same results, or is unrelated."""
    call, call_copy = subject.calls[0], subject.calls[0].copy()
    with torch.no_grad():
        value = attempt(function, *call_copy.args, **call_copy.kwargs)
    if isinstance(value, Exception):
        return False
    return (
        random
        or subject.mutates
        or not first_difference(Expectation(subject.run_copy(call), call, subject.run), flat_results(value))
    )


def _check_function(subject: Subject, name: str, function: Callable[..., Any], *, random: bool) -> Findings:
    calls = subject.calls_with_dtypes(torch.float32)
    for call in (calls[0], *calls[1:][-1:]):  # the last differs most
        fault, fix, kind = _static_fault(subject, function, call, random=random)
        if fault:
            yield failed("compile", f"{name}: {fault}, for {subject.base_name}{call}", fix, kind)
            return
    yield from _dynamic(subject, name, function)


def _results(subject: Subject, function: Callable[..., Any], call: OperatorCall) -> list[Any]:
    seed_generator(0, torch.device(subject.device))
    with torch.no_grad():
        value = function(*call.args, **call.kwargs)
    return [*flat_results(value), *subject.written_tensors(call)]


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _static_fault(
    subject: Subject, function: Callable[..., Any], call: OperatorCall, *, random: bool
) -> tuple[str, str, str]:
    dynamo.reset()
    run = partial(_results, subject, function)
    expected = Expectation(run(call.copy()), call, run)
    compiled = torch.compile(_wrapped(function), fullgraph=True, backend="aot_eager", dynamic=False)
    actual = attempt(_results, subject, compiled, call.copy())
    if isinstance(actual, Exception):
        fault, fix = _compile_fault(actual)
        return fault, fix, KIND_TRACING if fix == fixes.SEE_FAKE else ""
    if not random and (message := first_difference(expected, actual)):
        return f"compiled, it gives a different result: {message}", fixes.COMPILED_DIFFERS, KIND_CONTENTS
    return "", "", ""


def _compile_fault(error: Exception) -> tuple[str, str]:
    """Return the fault and the fix for an error of the compiler."""
    text = str(error)
    cause = text.splitlines()[0] if text else ""
    reason = re.search(r"Explanation: *(.+)", text)
    places = [
        (file, line, code)
        for file, line, code in re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.+)', text)
        if is_user_file(file)
    ]
    where = f" at {places[-1][0]}:{places[-1][1]} (`{places[-1][2].strip()}`)" if places else ""
    if places or (type(error).__name__ == "Unsupported" and "fake" not in cause):
        return (
            f"graph break{where}: {cause}{f': {reason[1]}' if reason and reason[1].strip() else ''}",
            fixes.GRAPH_BREAK,
        )
    fix = fixes.SEE_FAKE
    return f"torch.compile(fullgraph=True) raises{where}: {describe_error(error)}", fix


def _dynamic(subject: Subject, name: str, function: Callable[..., Any]) -> Findings:
    """Compile with dynamic sizes, and check that three sizes share one graph."""
    dynamo.reset()
    counter = _CountingBackend()
    compiled = torch.compile(_wrapped(function), fullgraph=True, backend=counter, dynamic=True)
    for call in subject.calls_with_dtypes(torch.float32)[:4]:
        resized_calls = [call, subject.resized(call, lambda n: 2 * n + 3), subject.resized(call, lambda n: 3 * n + 1)]
        expected = [attempt(_results, subject, function, resized_call.copy()) for resized_call in resized_calls]
        if any(isinstance(answer, Exception) for answer in expected) or not call.tensors:
            continue
        first = 0
        for resized_call in resized_calls:
            actual = attempt(_results, subject, compiled, resized_call.copy())
            if isinstance(actual, Exception):
                fault, fix = _compile_fault(actual)
                where = f"{name} with dynamic=True: {fault}, for {subject.base_name}{resized_call}"
                yield failed("compile", where, fix, KIND_TRACING if fix == fixes.SEE_FAKE else "")
                return
            first = first or counter.graphs  # one call may invoke the backend twice
        if counter.graphs > first:
            calls = ", ".join(f"{subject.base_name}{resized_call}" for resized_call in resized_calls)
            yield failed(
                "compile", f"{name} with dynamic=True: {1 + counter.graphs - first} graphs for the sizes of {calls}",
                fixes.RECOMPILES,
            )  # fmt: skip
        return


class _CountingBackend:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return dynamo.lookup_backend("aot_eager")(graph, inputs)
