"""Check torch.compile on an operator and its public functions: no graph breaks, any size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import _dynamo as dynamo

from opforge.authoring.checking import fixes
from opforge.authoring.checking.calls import Call, flat
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.report import CONTENTS
from opforge.authoring.checking.subject import Findings, Subject, failed, short
from opforge.frames import is_users
from opforge.sandbox.state import seed_generator

_OP = "torch.ops.{}"


def check(subject: Subject) -> Findings:
    """Yield graph breaks, results that change when compiled, and recompilation for new sizes."""
    random = subject.is_random()
    function = _OP.format(subject.name.replace("::", "."))
    yield from _one(subject, function, subject.overload, random=random)
    for public in subject.functions:
        if _gives_same_results(public, subject, random=random):
            yield from _one(subject, f"{public.__module__}.{public.__name__}", public, random=random)


def _gives_same_results(function: Callable[..., Any], subject: Subject, *, random: bool) -> bool:
    """Whether a function with the operator's name gives the same results, or is unrelated."""
    call = subject.calls[0]
    try:
        call_copy = call.copied()
        with torch.no_grad():
            actual = flat(function(*call_copy.args, **call_copy.kwargs))
    except Exception:  # noqa: BLE001
        return False
    return random or subject.mutates or not differences(subject.answer(call), actual)


def _one(subject: Subject, name: str, function: Callable[..., Any], *, random: bool) -> Findings:
    calls = subject.first(torch.float32)
    for call in (calls[0], *calls[1:][-1:]):  # the last differs most
        fault, fix, kind = _static_fault(subject, function, call, random=random)
        if fault:
            yield failed("compile", f"{name}: {fault}, for {subject.base}{call}", fix, kind)
            return
    yield from _dynamic(subject, name, function)


def _results(subject: Subject, function: Callable[..., Any], call: Call) -> list[Any]:
    seed_generator(0, torch.device(subject.device))
    with torch.no_grad():
        value = function(*call.args, **call.kwargs)
    return [*flat(value), *subject.written_tensors(call)]


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def _static_fault(subject: Subject, function: Callable[..., Any], call: Call, *, random: bool) -> tuple[str, str, str]:
    dynamo.reset()
    expected = _results(subject, function, call.copied())
    compiled = torch.compile(_wrapped(function), fullgraph=True, backend="aot_eager", dynamic=False)
    try:
        actual = _results(subject, compiled, call.copied())
    except Exception as error:  # noqa: BLE001  # any error of the compiler is a fault
        return *_broken(error), ""
    if not random and (message := differences(expected, actual)):
        return f"compiled, it gives another answer: {message}", fixes.COMPILED_OTHERWISE, CONTENTS
    return "", "", ""


def _broken(error: Exception) -> tuple[str, str]:
    """Return the fault and the fix for an error of the compiler."""
    text = str(error)
    cause = text.splitlines()[0] if text else ""
    reason = re.search(r"Explanation: *(.+)", text)
    places = [
        (file, line, code)
        for file, line, code in re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.+)', text)
        if is_users(file)
    ]
    where = f" at {places[-1][0]}:{places[-1][1]} (`{places[-1][2].strip()}`)" if places else ""
    if places or (type(error).__name__ == "Unsupported" and "fake" not in cause):
        return (
            f"graph break{where}: {cause}{f': {reason[1]}' if reason and reason[1].strip() else ''}",
            fixes.GRAPH_BREAK,
        )
    fix = fixes.SEE_FAKE
    return f"torch.compile(fullgraph=True) raises{where}: {short(error)}", fix


def _dynamic(subject: Subject, name: str, function: Callable[..., Any]) -> Findings:
    """Compile with dynamic sizes, and check that three sizes share one graph."""
    dynamo.reset()
    counter = _CountingBackend()
    compiled = torch.compile(_wrapped(function), fullgraph=True, backend=counter, dynamic=True)
    for call in subject.first(torch.float32)[:4]:
        resized_calls = [call, subject.resized(call, lambda n: 2 * n + 3), subject.resized(call, lambda n: 3 * n + 1)]
        expected = [_answer(subject, function, resized_call) for resized_call in resized_calls]
        if any(answer is None for answer in expected) or not call.tensors:
            continue
        first = 0
        for resized_call in resized_calls:
            try:
                _results(subject, compiled, resized_call.copied())
                first = first or counter.graphs  # one call may invoke the backend twice
            except Exception as error:  # noqa: BLE001
                fault, fix = _broken(error)
                yield failed("compile", f"{name} with dynamic=True: {fault}, for {subject.base}{resized_call}", fix)
                return
        if counter.graphs > first:
            calls = ", ".join(f"{subject.base}{resized_call}" for resized_call in resized_calls)
            yield failed(
                "compile", f"{name} with dynamic=True: {1 + counter.graphs - first} graphs for the sizes of {calls}",
                fixes.MANY_GRAPHS,
            )  # fmt: skip
        return


def _answer(subject: Subject, function: Callable[..., Any], call: Call) -> list[Any] | None:
    try:
        return _results(subject, function, call.copied())
    except Exception:  # noqa: BLE001  # an unsupported size
        return None


class _CountingBackend:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return dynamo.lookup_backend("aot_eager")(graph, inputs)
