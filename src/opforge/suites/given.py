"""A suite of cases supplied by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from opforge.cases import Case, Phase
from opforge.cases.case import Expect
from opforge.cases.text import format_arguments, parse_arguments
from opforge.cases.values import TensorSpec
from opforge.errors import CaseSyntaxError
from opforge.runtime.trees import instances
from opforge.suites.base import LoadedSuite, Progress, SuiteOptions, no_progress


class GivenSuite:
    """Cases supplied by the caller."""

    name = "given"

    def __init__(self, cases: Iterable[Case], blobs: Mapping[str, Path] | None = None) -> None:
        self._blobs = dict(blobs or {})
        self._cases: dict[str, dict[str, Case]] = {}
        for case in cases:
            self._cases.setdefault(case.op, {})[case.id] = case

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        progress(self.name, 1, 1)
        chosen = {op: list(cases.values()) for op, cases in self._cases.items()}
        wanted = {op: c for op, c in chosen.items() if options.ops is None or op in options.ops}
        return LoadedSuite(self.name, wanted, self._blobs)


def performance_case(op: str, text: str) -> Case:
    """Parse a case to be timed from its text form; its contents are drawn from a seed."""
    return given_case(op, text, phase=Phase.PERFORMANCE)


def given_case(op: str, text: str, *, phase: Phase = Phase.CORRECTNESS, expect: Expect = Expect.RETURNS) -> Case:
    """Parse a case from its text form; its contents are drawn from a seed."""
    args, kwargs = parse_arguments(text)
    if any(spec.at is not None for spec in instances((args, kwargs), TensorSpec)):
        raise CaseSyntaxError(
            f"{text!r} refers with at= to a suite's stored contents, which are not here; remove at=, "
            "and give the range of values with low= and high="
        )
    return Case.make(op, format_arguments(args, kwargs), phase=phase, expect=expect, source="given")
