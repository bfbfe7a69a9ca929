"""Scores of a run. Failed, crashed and missing operators stay in the denominator."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opforge.cases import Phase
from opforge.judge.verdict import PYTORCH_DEFECT, REFERENCE_DEFECT, VerdictKind
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.speed import CaseSpeed, PerfAtP, Ratio, geomean

PERF_AT_P_THRESHOLDS = (0.8, 1.0, 1.2, 1.5, 2.0)
"""Speedups at which perf@p is always reported, besides the requested one."""
_MACHINE_NOTE = re.compile(r"\bclock|throttl|\bpower\b|temperature", re.IGNORECASE)
"""Matches notes on clocks and power. They concern the machine and are reported once."""


@dataclass
class OperatorTally:
    """The verdicts on one operator, or on one of its kernels if those are scored separately."""

    op: str
    kernel: str = ""
    per_kernel: bool = False
    """Whether it covers one kernel of an operator that others may serve too."""
    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Count of each failed verdict and reason; similar reasons are counted together."""
    raised: int = 0
    """Cases that passed because the kernel raised where ATen does."""
    performance_cases: int = 0
    """Cases meant to be timed, whatever their verdict."""
    times: list[CaseSpeed] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    """The ATen calls of the kernel in one case."""
    tolerated: int = 0
    """Cases judged by a tolerance because the operator has no float64 form."""
    aten_bugs: Counter[str] = field(default_factory=Counter)
    """Checks skipped because of a PyTorch bug, and how often."""
    ways: Counter[str] = field(default_factory=Counter)
    """How cases ran behind a native slot: replayed, C++ or Python."""
    not_replayed: Counter[str] = field(default_factory=Counter)
    """Why cases ran through Python there, and how often."""

    @property
    def unit(self) -> str:
        """Return the scored item: the operator, or the kernel if those are scored separately."""
        return self.kernel if self.per_kernel else self.op

    @property
    def total(self) -> int:
        return self.verdicts.total()

    @property
    def passed(self) -> int:
        return self.verdicts[VerdictKind.PASSED]

    @property
    def pass_rate(self) -> float:
        return self.passed / self.total if self.total else 0.0

    def main_reasons(self, limit: int) -> list[tuple[str, str, int]]:
        """Return the most frequent reasons; cases not run because others crashed come last."""
        ordered = sorted(self.reasons.items(), key=lambda item: (item[0][1].startswith("not run"), -item[1]))
        return [(verdict, reason, count) for (verdict, reason), count in ordered[:limit]]

    @property
    def is_correct(self) -> bool:
        return self.total > 0 and self.passed == self.total

    @property
    def declined(self) -> bool:
        """Whether the kernel raised on every case.

        Raising where ATen raises too is no sign of serving the operator.
        """
        declined = self.verdicts[VerdictKind.UNSUPPORTED]
        return declined > 0 and declined + self.raised == self.total

    @property
    def scored_times(self) -> list[CaseSpeed]:
        """Return the times that count: kernel correct, no alarm, not launch-bound."""
        return [t for t in self.times if t.is_scored] if self.is_correct else []

    @property
    def launch_bound_times(self) -> list[CaseSpeed]:
        """Return the launch-bound times of a correct kernel, which are scored separately."""
        return [t for t in self.times if t.launch_bound and not t.alarm] if self.is_correct else []

    @property
    def all_launch_bound(self) -> bool:
        """Whether all cases to be timed are launch-bound; the speed scores then exclude it."""
        return 0 < self.performance_cases == len(self.launch_bound_times)

    @property
    def alarms(self) -> list[CaseSpeed]:
        return [t for t in self.times if t.alarm]

    @property
    def speed(self) -> Ratio | None:
        """Return the geometric mean over the timed cases that count."""
        return geomean(t.speed for t in self.scored_times)

    @property
    def speedup(self) -> float | None:
        return None if self.speed is None else self.speed.value

    @property
    def launch_speed(self) -> Ratio | None:
        """Return the geometric mean over the launch-bound cases."""
        return geomean(t.speed for t in self.launch_bound_times)

    @property
    def call_speed(self) -> Ratio | None:
        """Return the geometric mean of call times over the cases that count.

        Only cases with device time as their headline have a separate call time.
        """
        return geomean(t.call_speed for t in self.scored_times if t.call_speed is not None)

    @property
    def sol_percent(self) -> float | None:
        """Return the kernel's percent of the speed of light: the median of the cases that count."""
        return _median(t.sol_percent for t in self.scored_times)

    @property
    def aten_sol_percent(self) -> float | None:
        return _median(t.aten_sol_percent for t in self.scored_times)


@dataclass
class Summary:
    """All operators of a run, and its scores."""

    operators: dict[str, OperatorTally]
    missing: tuple[str, ...]
    optional: frozenset[str]
    planned: int
    """Number of operators the run was to judge, including those without a kernel."""
    p: float = 1.0
    weak: dict[str, list[str]] = field(default_factory=dict)
    """Operators whose cases let mutants of ATen pass, with those mutants."""
    planned_timed_units: frozenset[str] | None = None
    """The selected operators with performance cases; None in manifests of older runs."""
    machine_notes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Notes on clocks and power: the first note of each kind, and the number of cases with it."""
    separate_kernels: frozenset[str] = frozenset()
    """Kernels that are scored by themselves: those of custom operators."""

    @classmethod
    def start(cls, manifest: Manifest) -> Summary:
        """Return the summary of a run without verdicts."""
        plan = manifest.plan
        return cls(
            {},
            plan.missing,
            frozenset(plan.optional),
            plan.operators,
            manifest.config["p"],
            plan.weak.ops,
            None if plan.performance is None else frozenset(plan.performance),
            separate_kernels=frozenset(kernel.name for kernel in plan.kernels if kernel.reference is not None),
        )

    @classmethod
    def from_rows(cls, manifest: Manifest, rows: Iterable[ResultRow]) -> Summary:
        summary = cls.start(manifest)
        for row in rows:
            summary.add(row)
        return summary

    def unit_of(self, row: ResultRow) -> str:
        """Return the scored item of a row: the operator, or the kernel if that is scored by itself."""
        return row.kernel if row.kernel in self.separate_kernels else row.op

    def add(self, row: ResultRow) -> None:
        """Count one verdict."""
        unit = self.unit_of(row)
        tally = self.operators.get(unit)
        if tally is None:
            tally = OperatorTally(row.op, row.kernel, row.kernel in self.separate_kernels)
            self.operators[unit] = tally
        tally.verdicts[row.verdict] += 1
        if row.verdict != VerdictKind.PASSED:
            tally.reasons[row.verdict, row.reason] += 1
        tally.raised += row.raised
        tally.tolerated += row.tolerated
        tally.calls = tally.calls or row.calls
        tally.aten_bugs.update(note for note in row.notes if PYTORCH_DEFECT in note or REFERENCE_DEFECT in note)
        tally.ways.update([row.ran] if row.ran else [])
        tally.not_replayed.update([row.not_replayed] if row.not_replayed else [])
        timed = CaseSpeed.from_row(row)
        tally.performance_cases += timed is not None or row.phase == Phase.PERFORMANCE
        if timed is not None:
            tally.times.append(timed)
            self._note_machine(row.notes)

    def _note_machine(self, notes: Iterable[str]) -> None:
        """Record notes about the machine once: notes that differ only in their numbers are one."""
        for note in filter(_MACHINE_NOTE.search, notes):
            kind = re.sub(r"[\d.,]+", "#", note)
            first, count = self.machine_notes.get(kind, (note, 0))
            self.machine_notes[kind] = first, count + 1

    @property
    def baseline(self) -> str:
        """Return the baseline of the races, as columns and scores name it."""
        return "reference" if self.separate_kernels else "ATen"

    @property
    def reference_name(self) -> str:
        """Return the baseline as verdicts name it."""
        return "the reference" if self.separate_kernels else "ATen"

    @property
    def unit_noun(self) -> str:
        """Return the plural noun for the scored items."""
        return "implementations" if self.separate_kernels else "operators"

    @property
    def judged(self) -> list[OperatorTally]:
        """Return the operators that kernels serve.

        An optional overload that was declined on every case is left out.
        """
        return [t for t in self.operators.values() if not (t.op in self.optional and t.declined)]

    @property
    def declined(self) -> list[str]:
        return [t.op for t in self.operators.values() if t.op in self.optional and t.declined]

    @property
    def weak_judged(self) -> dict[str, list[str]]:
        """Return the judged operators whose cases let mutants pass: passing means less there."""
        return {t.op: self.weak[t.op] for t in self.judged if t.op in self.weak}

    @property
    def operator_count(self) -> int:
        return self.planned

    @property
    def correctness(self) -> float:
        """Mean pass rate over all selected operators; those without a kernel count as 0."""
        return sum(t.pass_rate for t in self.judged) / self.operator_count if self.operator_count else 0.0

    @property
    def correctness_of_judged(self) -> float:
        return sum(t.pass_rate for t in self.judged) / len(self.judged) if self.judged else 0.0

    @property
    def coverage(self) -> float:
        return len(self.judged) / self.operator_count if self.operator_count else 0.0

    @property
    def case_counts(self) -> Counter[str]:
        return sum((t.verdicts for t in self.operators.values()), Counter())

    @property
    def ways(self) -> Counter[str]:
        """Return how many cases ran in which way behind native slots; none in runtime python."""
        return sum((t.ways for t in self.operators.values()), Counter())

    @property
    def not_replayed(self) -> Counter[str]:
        """Return why cases ran through Python behind native slots, and how often."""
        return sum((t.not_replayed for t in self.operators.values()), Counter())

    @property
    def speed(self) -> Ratio | None:
        """Geometric mean of the speedups of correct kernels; None if no timed case counts."""
        return geomean(t.speed for t in self.judged if t.speed is not None)

    @property
    def performance(self) -> float | None:
        return None if self.speed is None else self.speed.value

    @property
    def performance_interval(self) -> tuple[float, float] | None:
        return None if self.speed is None else self.speed.interval

    @property
    def call_speed(self) -> Ratio | None:
        """Return the geometric mean of call times, if the headline is device time."""
        return geomean(t.call_speed for t in self.judged if t.call_speed is not None)

    @property
    def launch_speed(self) -> Ratio | None:
        """Return the geometric mean over the launch-bound cases, which no other score includes."""
        return geomean(t.launch_speed for t in self.judged if t.launch_speed is not None)

    @property
    def timed_units(self) -> frozenset[str]:
        """Return the operators of perf@p: those with performance cases.

        Operators whose cases are all launch-bound are left out.
        """
        races = self._operators_with_races() if self.planned_timed_units is None else self.planned_timed_units
        return races - frozenset(t.unit for t in self.judged if t.all_launch_bound)

    def _operators_with_races(self) -> frozenset[str]:
        """Return the operators with performance cases according to the results.

        The results do not say whether a missing operator has any, so it counts.
        """
        seen = frozenset(t.op for t in self.operators.values() if t.performance_cases)
        return seen | frozenset(self.missing) if seen else seen

    def perf_at(self, p: float) -> PerfAtP | None:
        """Return perf@p; None if there is nothing to race.

        Wrong, crashed, missing and alarmed operators count as failures.
        """
        racing = self.timed_units
        if not racing:
            return None
        speeds = (t.speed for t in self.judged if t.unit in racing and not t.alarms)
        return PerfAtP.from_speeds(p, (s for s in speeds if s is not None), len(racing))

    @property
    def perf_at_p(self) -> float | None:
        share = self.perf_at(self.p)
        return None if share is None else share.value

    @property
    def alarms(self) -> list[tuple[OperatorTally, CaseSpeed]]:
        """Return the cases measured faster than the speed of light, of correct kernels or not."""
        return [(tally, timed) for _, tally in sorted(self.operators.items()) for timed in tally.alarms]

    @property
    def exit_code(self) -> int:
        """0 if all judged kernels are correct, 1 if some are not, 5 if nothing was judged."""
        if not self.judged:
            return 5
        return 0 if all(t.is_correct for t in self.judged) else 1

    def scores(self) -> dict[str, Any]:
        """Return the scores as the reports write them."""
        return {
            "correctness": self.correctness,
            "correctness_of_judged": self.correctness_of_judged,
            "coverage": self.coverage,
            "operators": self.operator_count,
            "judged": len(self.judged),
            "right": sum(1 for t in self.judged if t.is_correct),
            "missing": len(self.missing),
            "declined": len(self.declined),
            "cases": self.case_counts.total(),
            "verdicts": dict(self.case_counts),
            **({"ran": dict(self.ways), "not_replayed": dict(self.not_replayed.most_common(8))} if self.ways else {}),
            **self._speed_scores(),
            "weak": sorted(self.weak_judged),
        }

    def _speed_scores(self) -> dict[str, Any]:
        speed, call, launch, share = self.speed, self.call_speed, self.launch_speed, self.perf_at(self.p)
        times = [t for tally in self.operators.values() for t in tally.times]
        curve = (self.perf_at(p) for p in PERF_AT_P_THRESHOLDS)
        return {
            "performance": _value(speed),
            "performance_interval": _interval(speed),
            "performance_operators": sum(1 for t in self.judged if t.speed is not None),
            "performance_call": _value(call),
            "performance_call_interval": _interval(call),
            "performance_launch_bound": _value(launch),
            "performance_launch_bound_interval": _interval(launch),
            "performance_launch_bound_operators": sum(1 for t in self.judged if t.launch_bound_times),
            "p": self.p,
            "perf_at_p": None if share is None else share.value,
            "perf_at_p_interval": None if share is None else (share.low, share.high),
            "perf_at_p_operators": len(self.timed_units),
            "perf_curve": [point.as_json() for point in curve if point is not None],
            "performance_cases": sum(t.performance_cases for t in self.operators.values()),
            "timed_cases": len(times),
            "launch_bound_cases": sum(1 for t in times if t.launch_bound),
            "alarmed_cases": sum(1 for t in times if t.alarm),
            "alarms": [
                {"op": tally.op, "kernel": tally.kernel, "case": timed.case, "alarm": timed.alarm}
                for tally, timed in self.alarms
            ],
            "machine": [{"note": note, "cases": count} for note, count in self.machine_notes.values()],
        }


def _interval(ratio: Ratio | None) -> tuple[float, float] | None:
    return None if ratio is None else ratio.interval


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
