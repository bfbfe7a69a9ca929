"""Calls of an operator: from the user's file, from its package, or made from the schema."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opforge.check import fake, generated_calls, guarded_memory
from opforge.check.differences import first_difference
from opforge.check.messages import AcceptedCall, Calling, CallPlan, EveryCallRefused, NoCallAccepted, Send
from opforge.check.operator_call import OperatorCall, to_device
from opforge.check.subject import Subject, attempt, describe_error
from opforge.errors import OpforgeError
from opforge.imports import run_file

_PASS_TIMEOUT_S = 8.0
"""Time limit for each of two passes through the plans."""
_MAX_REPORTED_ERRORS = 3
ALIAS_ERROR_TEXT = "may not alias any inputs"
"""Part of torch's error when an operator of torch.library.custom_op returns an input."""


@dataclass(frozen=True)
class DeclaredInputs:
    """Calls and references declared in a file, by operator name."""

    calls: dict[str, list[OperatorCall]]
    references: dict[str, Callable[..., Any]]


def declared_inputs(package: str, file: str, device: str) -> tuple[DeclaredInputs, str]:
    """Return the declarations of the user's file or else of the package, and their source."""
    if file:
        return _read(_run_file(file), file, device), Path(file).name
    name = f"{package}.opforge_inputs"
    if hasattr(sys.modules.get(package), "__path__") and importlib.util.find_spec(name) is not None:
        return _read(importlib.import_module(name), name, device), name
    return DeclaredInputs({}, {}), ""


def _run_file(file: str) -> ModuleType:
    if not file.endswith(".py"):
        raise OpforgeError(f"{file!r} is not a Python file; --inputs needs one with a function inputs()")
    return run_file(Path(file), "_opforge_check_inputs")


def _read(module: ModuleType, source: str, device: str) -> DeclaredInputs:
    if not callable(getattr(module, "inputs", None)):
        raise OpforgeError(f'{source} has no function inputs(); it returns {{"ns::op": [(args, kwargs), …]}}')
    torch.manual_seed(0)
    rows = module.inputs()
    references = module.references() if callable(getattr(module, "references", None)) else {}
    if not isinstance(rows, dict) or not isinstance(references, dict):
        raise OpforgeError(f'inputs() and references() of {source} return a dict each, by operator, such as "ns::op"')
    return DeclaredInputs(
        {name: [_call(row, source, name, device) for row in op_rows] for name, op_rows in rows.items()}, references
    )


def _call(row: Any, source: str, name: str, device: str) -> OperatorCall:
    match row:
        case (tuple() | list() as args, dict() as kwargs):
            return OperatorCall(tuple(args), kwargs).map_tensors(lambda t: to_device(t.detach(), device))
    raise OpforgeError(
        f"inputs() of {source} has {row!r:.80} for {name}; allowed is (args, kwargs), a tuple and a dict"
    )


def lookup(table: dict[str, Any], name: str) -> Any:
    """Look up an operator in a table by its full name or without the overload; None if absent."""
    for key in (name, name.removesuffix(".default"), name.partition(".")[0]):
        if key in table:
            return table[key]
    return None


def search_calls(subject: Subject, start: int, send: Send) -> None:
    """Try calls made from the schema, and report the accepted ones; runs in a fork."""
    search = _Search(subject, start, send)
    search.run()
    if not search.accepted:
        commonest = [f"{error} ({count} calls)" for error, count in search.errors.most_common(_MAX_REPORTED_ERRORS)]
        send(NoCallAccepted(search.tried, commonest))


class _Search:
    """Tries plans for calls; skips those tried before a crash."""

    def __init__(self, subject: Subject, start: int, send: Send) -> None:
        self.subject, self.start, self.send = subject, start, send
        self.deadline = 0.0
        self.errors: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.accepted: list[CallPlan] = []
        self.tried = self.number = 0
        self.stopped = False

    def run(self) -> None:
        """Try the plans in two passes.

        The first pass takes only plausible calls: the fake accepts them, and the result is stable.
        """
        for careful in (True, False):
            self.deadline = time.monotonic() + _PASS_TIMEOUT_S
            self.implausible: set[str] = set()
            for plan in generated_calls.candidate_plans():
                if self.stopped or time.monotonic() > self.deadline:
                    break
                if self.try_plan(plan, plausible_only=careful):
                    self.try_variations(plan, plausible_only=careful)
                    return

    def try_variations(self, plan: CallPlan, *, plausible_only: bool) -> None:
        for other in generated_calls.variations(plan):
            if len(self.accepted) >= generated_calls.MAX_CALLS or self.stopped or time.monotonic() > self.deadline:
                return
            if other.given == plan.given or not any(one.given != plan.given for one in self.accepted):
                self.try_plan(other, plausible_only=plausible_only)

    def try_plan(self, plan: CallPlan, *, plausible_only: bool) -> bool:
        """Try one call; return whether the operator accepts it."""
        self.number += 1
        call = generated_calls.make_call(self.subject.arguments, plan, self.subject.device)
        if call is None or self.number <= self.start or str(call) in self.seen | self.implausible:
            return False
        if plausible_only and (refusal := fake.refusal_reason(self.subject, call)):
            self.errors[f"the fake says {refusal}"] += 1
            self.implausible.add(str(call))
            return False
        self.seen.add(str(call))
        self.send(Calling(str(call), self.number))
        self.tried += 1
        if guarded_memory.writes_out_of_bounds(self.subject.overload, call, self.subject.device):
            return self.accept(
                plan, call, plausible=plausible_only
            )  # `mask` reports it; unguarded it would corrupt memory
        difference = attempt(self.run_difference, call, repeat=plausible_only)
        if isinstance(difference, Exception):
            self.note_refusal(difference)
            return False
        if difference:
            self.errors["results that change from call to call"] += 1
            self.seen.discard(str(call))
            self.implausible.add(str(call))
            return False
        return self.accept(plan, call, plausible=plausible_only)

    def run_difference(self, call: OperatorCall, *, repeat: bool) -> str:
        """Run a call; if it is repeated, describe how the results differ."""
        results = self.subject.run_copy(call)
        return first_difference(results, self.subject.run_copy(call)) if repeat else ""

    def accept(self, plan: CallPlan, call: OperatorCall, *, plausible: bool) -> bool:
        self.accepted.append(plan)
        self.send(AcceptedCall(str(call), plan, plausible))
        return True

    def note_refusal(self, error: Exception) -> None:
        text = str(error)
        self.errors[describe_error(error, 160)] += 1
        if ALIAS_ERROR_TEXT in text:
            self.send(EveryCallRefused(returns_input=True))
            self.stopped = True
        elif isinstance(error, NotImplementedError) and f"Could not run '{self.subject.name}'" in text:
            self.send(EveryCallRefused(returns_input=False))
            self.stopped = True


def rebuild_calls(subject: Subject, plans: list[CallPlan]) -> Iterator[OperatorCall]:
    """Recreate the accepted calls from their plans."""
    for plan in plans:
        call = generated_calls.make_call(subject.arguments, plan, subject.device)
        if call is not None:
            yield call
