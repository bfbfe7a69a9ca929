"""Strength of a suite: the mutants of ATen that it rejects, and those that it lets pass."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opforge.cache import torch_version
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError
from opforge.judge.verdict import REJECTING_KINDS
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.mutants import kind_of, mutants_of
from opforge.ops import table
from opforge.runs.config import RunConfig
from opforge.runs.execute.judge_pool import JudgePool, start_server
from opforge.runs.plan import Job, OperatorCases, Plan, load_suite
from opforge.runs.rows import ResultRow
from opforge.sandbox.host.client import ForkServerHandle
from opforge.sandbox.host.system_check import check_device
from opforge.suites import LoadedSuite
from opforge.suites.base import Progress, no_progress

_ORDER = ("", "void", "same", "changed")
"""Effects of a mutant, from none to a wrong answer; see `opforge.sandbox.mutants.mutant.MutantEffect`."""


@dataclass
class MutantResult:
    """The result for one mutant of one operator."""

    op: str
    mutant: str
    killed_by: str = ""
    """The verdict that killed it."""
    reason: str = ""
    case: str = ""
    effect: str = ""
    passed: int = 0
    """Number of cases it passed."""

    def add(self, row: ResultRow) -> None:
        """Add a verdict."""
        self.effect = max(self.effect, row.mutant_effect, key=_ORDER.index)
        self.passed += row.verdict == "passed"
        if row.verdict in REJECTING_KINDS and not self.killed_by:
            self.killed_by, self.reason, self.case = row.verdict, row.reason, row.case

    @property
    def survived(self) -> bool:
        return not self.killed_by and self.effect in ("same", "changed")

    @property
    def is_detectable(self) -> bool:
        """Whether it could be detected.

        One that is correct on all cases and their probes is no mutant.
        """
        return bool(self.killed_by) or self.survived

    @property
    def passed_wrong(self) -> bool:
        """Whether a case produced a wrong answer and still passed."""
        return self.survived and self.effect == "changed"


@dataclass
class Strength:
    """The mutants of a suite's operators, and the scores."""

    suite: str
    device: str
    dtypes: tuple[str, ...]
    torch: str
    date: str
    ops: tuple[str, ...] = ()
    """The selection as typed; empty for the whole suite."""
    results: dict[tuple[str, str], MutantResult] = field(default_factory=dict)

    def add(self, rows: Iterable[ResultRow]) -> None:
        for row in rows:
            key = row.op, row.kernel
            self.results.setdefault(key, MutantResult(*key)).add(row)

    @property
    def detectable(self) -> list[MutantResult]:
        return [t for t in self.results.values() if t.is_detectable]

    @property
    def survivors(self) -> list[MutantResult]:
        return sorted((t for t in self.results.values() if t.survived), key=lambda t: (t.op, t.mutant))

    @property
    def kill_rate(self) -> float:
        counted = self.detectable
        return sum(1 for t in counted if t.killed_by) / len(counted) if counted else 1.0

    @property
    def kills(self) -> Counter[str]:
        """Return the number of mutants killed by each verdict."""
        return Counter(t.killed_by for t in self.results.values() if t.killed_by)

    @property
    def weak(self) -> dict[str, list[str]]:
        """Return the operators with survivors, and the surviving mutants."""
        mutants_by_op: dict[str, list[str]] = {}
        for trace in self.survivors:
            mutants_by_op.setdefault(trace.op, []).append(trace.mutant)
        return mutants_by_op

    def by_mutant(self) -> dict[str, tuple[int, int]]:
        """Return the killed and counted mutants by kind."""
        return _rates(self.detectable, lambda t: kind_of(t.mutant))

    def by_operator(self) -> dict[str, tuple[int, int]]:
        """Return the killed and counted mutants by operator."""
        return dict(sorted(_rates(self.detectable, lambda t: t.op).items()))

    def as_json(self) -> dict[str, Any]:
        """Return everything, for the file in the cache and ``--format json``."""
        counted = self.detectable
        return {
            "suite": self.suite,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "torch": self.torch,
            "date": self.date,
            "ops": list(self.ops),
            "mutants": len(counted),
            "killed": sum(1 for t in counted if t.killed_by),
            "kill_rate": self.kill_rate,
            "equivalent": len(self.results) - len(counted),
            "kills": dict(self.kills),
            "by_mutant": {m: {"killed": k, "mutants": n} for m, (k, n) in self.by_mutant().items()},
            "by_operator": {op: {"killed": k, "mutants": n} for op, (k, n) in self.by_operator().items()},
            "weak": self.weak,
            "survivors": [
                {"op": t.op, "mutant": t.mutant, "differed": t.passed_wrong, "cases": t.passed} for t in self.survivors
            ],
        }

    def as_table(self) -> dict[str, Any]:
        """Return the fields that a run needs to name weak operators; this form is shipped."""
        row = self.as_json()
        return {k: row[k] for k in ("suite", "device", "dtypes", "torch", "date", "ops", "mutants", "killed", "weak")}


def measure_strength(config: RunConfig, *, progress: Progress = no_progress) -> Strength:
    """Run every mutant of a suite's operators until a case rejects it."""
    config = config.checked()
    table().select(config.ops)  # report a misspelt operator before starting anything
    server = start_server(config.device)
    try:
        if config.device != "cpu":
            check_device(server.spawner, config.device)
        return _measure(config, load_suite(config, progress), server, progress)
    finally:
        server.close()


def _measure(config: RunConfig, suite: LoadedSuite, server: ForkServerHandle, progress: Progress) -> Strength:
    jobs = mutant_jobs(suite)
    if not jobs:
        raise NothingToJudgeError(f"none of the operators that suite {suite.name!r} selects has a mutant")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    strength = Strength(suite.name, config.device, config.dtypes, torch_version(), today, config.ops)

    def emit(rows: list[ResultRow]) -> None:
        strength.add(rows)
        if rows:
            progress(f"{rows[0].op} {rows[0].kernel}", len(strength.results), len(jobs))

    JudgePool(config, server, emit).execute(Plan(suite, tuple(jobs), ()), jobs)
    return strength


def mutant_jobs(suite: LoadedSuite) -> list[Job]:
    """Return a job for each mutant of each operator; they share the operators' cases."""
    jobs = []
    for name, cases in suite.cases.items():
        op = table().get(name)
        part = OperatorCases(name, True, _judged(cases))
        for mutant in mutants_of(op) if op is not None and part.cases else ():
            kernel = Kernel(mutant, name, (ServedOperator(name),), mutant=mutant)
            jobs.append(Job(kernel, (part,), stop_on="rejected"))
    return jobs


def _judged(cases: list[Case]) -> list[Case]:
    """Return the cases that are not timed."""
    return [case for case in cases if case.phase is Phase.CORRECTNESS]


def _rates(traces: Iterable[MutantResult], key: Any) -> dict[str, tuple[int, int]]:
    rates: dict[str, tuple[int, int]] = {}
    for trace in traces:
        killed, count = rates.get(key(trace), (0, 0))
        rates[key(trace)] = killed + bool(trace.killed_by), count + 1
    return rates
