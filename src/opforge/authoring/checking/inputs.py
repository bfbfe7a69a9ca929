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

from opforge.authoring.checking import fake, guards, samples
from opforge.authoring.checking.calls import Call, moved
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.forks import Tell
from opforge.authoring.checking.subject import Subject, short
from opforge.errors import OpforgeError

_LIMIT_S = 8.0
"""Time limit for each of two passes through the plans."""
_MAX_REPORTED_ERRORS = 3
ALIAS_WORDS = "may not alias any inputs"
"""Part of torch's error when an operator of torch.library.custom_op returns an input."""


@dataclass(frozen=True)
class Given:
    """Calls and references declared in a file, by operator name."""

    calls: dict[str, list[Call]]
    references: dict[str, Callable[..., Any]]


def declared(package: str, file: str, device: str) -> tuple[Given, str]:
    """Return the declarations of the user's file or else of the package, and their source."""
    if file:
        return _read(_run_file(file), file, device), Path(file).name
    name = f"{package}.opforge_inputs"
    if hasattr(sys.modules.get(package), "__path__") and importlib.util.find_spec(name) is not None:
        return _read(importlib.import_module(name), name, device), name
    return Given({}, {}), ""


def _run_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_opforge_check_inputs", file)
    if spec is None or spec.loader is None:
        raise OpforgeError(f"{file!r} is no Python file; --inputs wants one with a function inputs()")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _read(module: ModuleType, place: str, device: str) -> Given:
    if not callable(getattr(module, "inputs", None)):
        raise OpforgeError(f'{place} has no function inputs(); it returns {{"ns::op": [(args, kwargs), …]}}')
    torch.manual_seed(0)
    rows = module.inputs()
    references = module.references() if callable(getattr(module, "references", None)) else {}
    if not isinstance(rows, dict) or not isinstance(references, dict):
        raise OpforgeError(f'inputs() and references() of {place} return a dict each, by operator, such as "ns::op"')
    return Given(
        {name: [_call(row, place, name, device) for row in op_rows] for name, op_rows in rows.items()}, references
    )


def _call(row: Any, place: str, name: str, device: str) -> Call:
    match row:
        case (tuple() | list() as args, dict() as kwargs):
            return Call(tuple(args), kwargs).mapped(lambda t: moved(t.detach(), device))
    raise OpforgeError(f"inputs() of {place} has {row!r:.80} for {name}; allowed is (args, kwargs), a tuple and a dict")


def of(table: dict[str, Any], name: str) -> Any:
    """Look up an operator in a table by its full name or without the overload; None if absent."""
    for key in (name, name.removesuffix(".default"), name.partition(".")[0]):
        if key in table:
            return table[key]
    return None


def find(subject: Subject, start: int, tell: Tell) -> None:
    """Try calls made from the schema, and report the accepted ones; runs in a fork."""
    search = _Search(subject, start, tell)
    search.seek()
    if not search.taken:
        commonest = [f"{error} ({count} calls)" for error, count in search.errors.most_common(_MAX_REPORTED_ERRORS)]
        tell({"none": True, "tried": search.tried, "errors": commonest})


class _Search:
    """Tries plans for calls; skips those tried before a crash."""

    def __init__(self, subject: Subject, start: int, tell: Tell) -> None:
        self.subject, self.start, self.tell = subject, start, tell
        self.until = 0.0
        self.errors: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.taken: list[samples.Plan] = []
        self.tried = self.number = 0
        self.stop = False

    def seek(self) -> None:
        """Try the plans in two passes.

        The first pass takes only plausible calls: the fake accepts them, and the result is stable.
        """
        for careful in (True, False):
            self.until = time.monotonic() + _LIMIT_S
            self.doubted: set[str] = set()
            for plan in samples.plans():
                if self.stop or time.monotonic() > self.until:
                    break
                if self.attempt(plan, careful=careful):
                    self.vary(plan, careful=careful)
                    return

    def vary(self, plan: samples.Plan, *, careful: bool) -> None:
        for other in samples.variations(plan):
            if len(self.taken) >= samples.MOST_CALLS or self.stop or time.monotonic() > self.until:
                return
            if other.given == plan.given or not any(one.given != plan.given for one in self.taken):
                self.attempt(other, careful=careful)

    def attempt(self, plan: samples.Plan, *, careful: bool) -> bool:
        """Try one call; return whether the operator accepts it."""
        self.number += 1
        call = samples.make(self.subject.arguments, plan, self.subject.device)
        if call is None or self.number <= self.start or str(call) in self.seen | self.doubted:
            return False
        if careful and (refusal := fake.refuses(self.subject, call)):
            self.errors[f"the fake says {refusal}"] += 1
            self.doubted.add(str(call))
            return False
        self.seen.add(str(call))
        self.tell({"at": self.number, "call": str(call)})
        self.tried += 1
        if guards.spoils(self.subject.overload, call, self.subject.device):
            return self.take(plan, call)  # `mask` reports it; unguarded it would corrupt memory
        try:
            answer = self.subject.answer(call)
            if careful and differences(answer, self.subject.answer(call), exact=True):
                self.errors["answers that change from call to call"] += 1
                self.seen.discard(str(call))
                self.doubted.add(str(call))
                return False
        except Exception as error:  # noqa: BLE001  # an operator may refuse with any error
            self.refused(error)
            return False
        return self.take(plan, call)

    def take(self, plan: samples.Plan, call: Call) -> bool:
        self.taken.append(plan)
        self.tell({"plan": [plan.shapes, plan.dtypes, plan.numbers, plan.given], "call": str(call)})
        return True

    def refused(self, error: Exception) -> None:
        text = str(error)
        self.errors[short(error, 160)] += 1
        if ALIAS_WORDS in text:
            self.tell({"alias": True})
            self.stop = True
        elif isinstance(error, NotImplementedError) and f"Could not run '{self.subject.name}'" in text:
            self.tell({"no_kernel": short(error, 160)})
            self.stop = True


def made(subject: Subject, rows: list[list[Any]]) -> Iterator[Call]:
    """Recreate the accepted calls from their plans."""
    for row in rows:
        call = samples.make(subject.arguments, samples.Plan(*row), subject.device)
        if call is not None:
            yield call
