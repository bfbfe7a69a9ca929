"""Strength of a suite: the mutants of ATen that it rejects, and those that it lets pass."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opforge.cache import torch_version
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError
from opforge.judge.verdict import REJECTED
from opforge.kernels import Kernel, Served
from opforge.kernels.mutants import kind_of, mutants_of
from opforge.ops import table
from opforge.runs.config import RunConfig
from opforge.runs.execute import LocalExecutor, start_server
from opforge.runs.plan import Job, Part, Plan, load_suite
from opforge.sandbox.client import ForkServer
from opforge.sandbox.probe import check_device
from opforge.suites import LoadedSuite
from opforge.suites.base import Progress, silent

_ORDER = ("", "void", "same", "changed")
"""Effects of a mutant, from none to a wrong answer; see `opforge.sandbox.mutants.Seen`."""


@dataclass
class Trace:
    """The result for one mutant of one operator."""

    op: str
    mutant: str
    killed: str = ""
    """The verdict that killed it."""
    reason: str = ""
    case: str = ""
    seen: str = ""
    passed: int = 0
    """Number of cases it passed."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a verdict."""
        self.seen = max(self.seen, str(row.get("mutant", "")), key=_ORDER.index)
        self.passed += row["verdict"] == "passed"
        if row["verdict"] in REJECTED and not self.killed:
            self.killed, self.reason, self.case = row["verdict"], row["reason"], row["case"]

    @property
    def survived(self) -> bool:
        return not self.killed and self.seen in ("same", "changed")

    @property
    def counts(self) -> bool:
        """Whether it could be detected.

        One that is correct on all cases and their witnesses is no mutant.
        """
        return bool(self.killed) or self.survived

    @property
    def let_through(self) -> bool:
        """Whether a case produced a wrong answer and still passed."""
        return self.survived and self.seen == "changed"


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
    traces: dict[tuple[str, str], Trace] = field(default_factory=dict)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            key = row["op"], row["kernel"]
            self.traces.setdefault(key, Trace(*key)).add(row)

    @property
    def counted(self) -> list[Trace]:
        return [t for t in self.traces.values() if t.counts]

    @property
    def survivors(self) -> list[Trace]:
        return sorted((t for t in self.traces.values() if t.survived), key=lambda t: (t.op, t.mutant))

    @property
    def kill_rate(self) -> float:
        counted = self.counted
        return sum(1 for t in counted if t.killed) / len(counted) if counted else 1.0

    @property
    def kills(self) -> Counter[str]:
        """Return the number of mutants killed by each verdict."""
        return Counter(t.killed for t in self.traces.values() if t.killed)

    @property
    def weak(self) -> dict[str, list[str]]:
        """Return the operators with survivors, and the surviving mutants."""
        mutants_by_op: dict[str, list[str]] = {}
        for trace in self.survivors:
            mutants_by_op.setdefault(trace.op, []).append(trace.mutant)
        return mutants_by_op

    def by_mutant(self) -> dict[str, tuple[int, int]]:
        """Return the killed and counted mutants by kind."""
        return _rates(self.counted, lambda t: kind_of(t.mutant))

    def by_operator(self) -> dict[str, tuple[int, int]]:
        """Return the killed and counted mutants by operator."""
        return dict(sorted(_rates(self.counted, lambda t: t.op).items()))

    def as_json(self) -> dict[str, Any]:
        """Return everything, for the file in the cache and ``--format json``."""
        counted = self.counted
        return {
            "suite": self.suite,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "torch": self.torch,
            "date": self.date,
            "ops": list(self.ops),
            "mutants": len(counted),
            "killed": sum(1 for t in counted if t.killed),
            "kill_rate": self.kill_rate,
            "equivalent": len(self.traces) - len(counted),
            "kills": dict(self.kills),
            "by_mutant": {m: {"killed": k, "mutants": n} for m, (k, n) in self.by_mutant().items()},
            "by_operator": {op: {"killed": k, "mutants": n} for op, (k, n) in self.by_operator().items()},
            "weak": self.weak,
            "survivors": [
                {"op": t.op, "mutant": t.mutant, "differed": t.let_through, "cases": t.passed} for t in self.survivors
            ],
        }

    def as_table(self) -> dict[str, Any]:
        """Return the fields that a run needs to name weak operators; this form is shipped."""
        row = self.as_json()
        return {k: row[k] for k in ("suite", "device", "dtypes", "torch", "date", "ops", "mutants", "killed", "weak")}


def measure(config: RunConfig, *, progress: Progress = silent) -> Strength:
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


def _measure(config: RunConfig, suite: LoadedSuite, server: ForkServer, progress: Progress) -> Strength:
    jobs = mutant_jobs(suite)
    if not jobs:
        raise NothingToJudgeError(f"none of the operators that suite {suite.name!r} selects has a mutant")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    strength = Strength(suite.name, config.device, config.dtypes, torch_version(), today, config.ops)

    def emit(rows: list[dict[str, Any]]) -> None:
        strength.add(rows)
        if rows:
            progress(f"{rows[0]['op']} {rows[0]['kernel']}", len(strength.traces), len(jobs))

    LocalExecutor(config, server, emit).execute(Plan(suite, tuple(jobs), ()), jobs)
    return strength


def mutant_jobs(suite: LoadedSuite) -> list[Job]:
    """Return a job for each mutant of each operator; they share the operators' cases."""
    jobs = []
    for name, cases in suite.cases.items():
        op = table().get(name)
        part = Part(name, True, _judged(cases))
        for mutant in mutants_of(op) if op is not None and part.cases else ():
            kernel = Kernel(mutant, name, (Served(name),), mutant=mutant)
            jobs.append(Job(kernel, (part,), until="rejected"))
    return jobs


def _judged(cases: list[Case]) -> list[Case]:
    """Return the cases that are not timed."""
    return [case for case in cases if case.phase is Phase.CORRECTNESS]


def _rates(traces: Iterable[Trace], key: Any) -> dict[str, tuple[int, int]]:
    rates: dict[str, tuple[int, int]] = {}
    for trace in traces:
        killed, count = rates.get(key(trace), (0, 0))
        rates[key(trace)] = killed + bool(trace.killed), count + 1
    return rates
