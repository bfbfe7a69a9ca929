"""Scores. What failed, crashed or is missing stays in the denominator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.verdict import FAULT, Outcome


@dataclass
class OperatorTally:
    """The verdicts on one operator."""

    op: str
    kernel: str = ""
    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each verdict other than passed came with each reason; similar reasons are counted together."""
    raised: int = 0
    """Cases that passed because the kernel raised where ATen does."""
    speedups: list[tuple[float, float, float]] = field(default_factory=list)
    """Speedup with its interval, of each timed case."""
    calls: dict[str, int] = field(default_factory=dict)
    """The ATen calls that the kernel makes in one case."""
    tolerated: int = 0
    """Cases judged by a tolerance because the operator has no float64 form."""
    defects: Counter[str] = field(default_factory=Counter)
    """What was not judged because PyTorch is at fault, and how often."""

    @property
    def total(self) -> int:
        return self.verdicts.total()

    @property
    def passed(self) -> int:
        return self.verdicts[Outcome.PASSED]

    @property
    def pass_rate(self) -> float:
        return self.passed / self.total if self.total else 0.0

    def main_reasons(self, most: int) -> list[tuple[str, str, int]]:
        """Return the most frequent reasons; cases that were not run after others had crashed come last."""
        ordered = sorted(self.reasons.items(), key=lambda item: (item[0][1].startswith("not run"), -item[1]))
        return [(verdict, reason, count) for (verdict, reason), count in ordered[:most]]

    @property
    def right(self) -> bool:
        return self.total > 0 and self.passed == self.total

    @property
    def declined(self) -> bool:
        """Whether the kernel raised on every case; where ATen raises too, that is no sign of serving it."""
        declined = self.verdicts[Outcome.UNSUPPORTED]
        return declined > 0 and declined + self.raised == self.total

    @property
    def speedup(self) -> float | None:
        """Return the geometric mean over the timed cases of a right kernel."""
        return _geomean([s for s, _, _ in self.speedups]) if self.right and self.speedups else None


@dataclass
class Summary:
    """All operators of a run, and its scores."""

    operators: dict[str, OperatorTally]
    missing: tuple[str, ...]
    optional: frozenset[str]
    planned: int
    """How many operators the run was to judge, with those that have no kernel."""
    p: float = 1.0
    weak: dict[str, list[str]] = field(default_factory=dict)
    """Operators whose cases let mutants of ATen through, and which."""

    @classmethod
    def start(cls, manifest: Mapping[str, Any]) -> Summary:
        """Return the summary of a run that has no verdicts yet."""
        config, plan = manifest["config"], manifest["plan"]
        weak = plan.get("weak", {}).get("ops", {})
        return cls({}, tuple(plan["missing"]), frozenset(plan["optional"]), plan["operators"], config["p"], weak)

    @classmethod
    def of(cls, manifest: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Summary:
        summary = cls.start(manifest)
        for row in rows:
            summary.add(row)
        return summary

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one verdict."""
        tally = self.operators.setdefault(row["op"], OperatorTally(row["op"], row["kernel"]))
        tally.verdicts[row["verdict"]] += 1
        if row["verdict"] != Outcome.PASSED:
            tally.reasons[row["verdict"], row["reason"]] += 1
        tally.raised += "raised" in row
        tally.tolerated += "rtol" in row
        tally.calls = tally.calls or row.get("calls", {})
        tally.defects.update(note for note in row.get("notes", ()) if FAULT in note)
        if "speedup" in row:
            tally.speedups.append((row["speedup"], row["speedup_low"], row["speedup_high"]))

    @property
    def judged(self) -> list[OperatorTally]:
        """Return the operators that kernels serve; an overload that a kernel may decline, and declined whole, is not."""
        return [t for t in self.operators.values() if not (t.op in self.optional and t.declined)]

    @property
    def declined(self) -> list[str]:
        return [t.op for t in self.operators.values() if t.op in self.optional and t.declined]

    @property
    def weak_judged(self) -> dict[str, list[str]]:
        """Return the judged operators whose cases are known to let mutants through: a pass says less there."""
        return {t.op: self.weak[t.op] for t in self.judged if t.op in self.weak}

    @property
    def operator_count(self) -> int:
        return self.planned

    @property
    def correctness(self) -> float:
        """Mean pass rate over all operators of the selection; those without a kernel count as nothing passed."""
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
    def performance(self) -> float | None:
        """Geometric mean of the speedups over ATen, over operators whose kernel is right; None when nothing was timed."""
        return _geomean([t.speedup for t in self.judged if t.speedup is not None])

    @property
    def performance_interval(self) -> tuple[float, float] | None:
        """Return the mean's interval, taking the timed cases' intervals as independent."""
        logs = [
            (math.log(s), (math.log(high) - math.log(low)) / 2 / len(t.speedups))
            for t in self.judged if t.speedup is not None
            for s, low, high in t.speedups
        ]  # fmt: skip
        centre = self.performance
        if centre is None:
            return None
        operators = sum(1 for t in self.judged if t.speedup is not None)
        reach = math.sqrt(sum(half * half for _, half in logs)) / operators
        return centre * math.exp(-reach), centre * math.exp(reach)

    @property
    def perf_at_p(self) -> float | None:
        """Share of the timed operators that are right and at least ``p`` times as fast as ATen."""
        timed = [t for t in self.judged if t.speedups or not t.right]
        if self.performance is None:
            return None
        return sum(1 for t in timed if t.speedup is not None and t.speedup >= self.p) / (len(timed) + len(self.missing))

    @property
    def exit_code(self) -> int:
        """0 when all judged kernels are right, 1 when some are not, 5 when nothing was judged."""
        if not self.judged:
            return 5
        return 0 if all(t.right for t in self.judged) else 1

    def scores(self) -> dict[str, Any]:
        """Return the scores as the reports write them."""
        return {
            "correctness": self.correctness,
            "correctness_of_judged": self.correctness_of_judged,
            "coverage": self.coverage,
            "operators": self.operator_count,
            "judged": len(self.judged),
            "right": sum(1 for t in self.judged if t.right),
            "missing": len(self.missing),
            "declined": len(self.declined),
            "cases": self.case_counts.total(),
            "verdicts": dict(self.case_counts),
            "performance": self.performance,
            "performance_interval": self.performance_interval,
            "p": self.p,
            "perf_at_p": self.perf_at_p,
            "weak": sorted(self.weak_judged),
        }


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
