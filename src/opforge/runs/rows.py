"""Lines of results.jsonl: one verdict each, with the figures that the judge measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

OLD_FIELDS = {"light": "sol", "forms": "variants"}
"""Names of fields in runs of version 0.1, which are still read, and their names now."""
VerdictKey = tuple[str, str, str, str]
"""Kernel, operator, case id and phase; judged once per run."""


@dataclass(frozen=True, slots=True)
class TimeRecord:
    """Times of one kind (device, call or sync): medians, and their ratio with its 95 % interval."""

    kernel_us: float | None
    aten_us: float | None
    speedup: float
    low: float
    high: float
    rounds: int
    calls: int | None = None
    """Calls in a round; None if unknown."""
    method: str = ""
    """Device times: ``graph`` or ``events``."""
    cache: str = ""
    """Device times: ``cold`` or ``warm``."""

    @classmethod
    def from_wire(cls, record: Mapping[str, Any]) -> TimeRecord:
        return cls(
            record.get("kernel_us"),
            record.get("aten_us"),
            record["speedup"],
            record["low"],
            record["high"],
            record.get("rounds", 0),
            record.get("calls"),
            record.get("method", ""),
            record.get("cache", ""),
        )


@dataclass(frozen=True, slots=True)
class SolRecord:
    """Cost of a case at the speed of light."""

    bytes: int
    flops: int
    us: float
    bound: str
    """What limits it: ``memory``, ``compute`` or ``latency``."""
    kernel: float | None
    """Percent of the speed of light that the kernel reaches; None if it is bound by latency."""
    aten: float | None
    counted: str
    """How bytes and flops were counted."""

    @classmethod
    def from_wire(cls, record: Mapping[str, Any]) -> SolRecord:
        get = record.get
        return cls(
            get("bytes", 0),
            get("flops", 0),
            get("us", 0.0),
            get("bound", ""),
            get("kernel"),
            get("aten"),
            get("counted", ""),
        )


class ResultRow(NamedTuple):
    """One verdict; docs/results.md describes the fields.

    A frozen dataclass takes four times as long to make, and a run has 30,000 rows.
    """

    op: str
    kernel: str
    case: str
    source: str
    id: str
    phase: str
    verdict: str
    reason: str
    notes: tuple[str, ...]
    figures: dict[str, Any]
    """Other fields in the order of the judge; those of newer versions are kept."""
    suite: str = ""

    @classmethod
    def from_wire(cls, line: Mapping[str, Any]) -> ResultRow:
        """Return a row; raises KeyError if it names no operator, kernel or verdict."""
        figures = dict(line)
        pop = figures.pop
        for old, new in OLD_FIELDS.items():
            if old in figures:
                figures.setdefault(new, pop(old))
        return cls(
            pop("op"),
            pop("kernel"),
            pop("case", ""),
            pop("source", ""),
            pop("id", ""),
            pop("phase", ""),
            pop("verdict"),
            pop("reason", ""),
            tuple(pop("notes", ())),
            figures,
            pop("suite", ""),
        )

    def wire(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "suite": self.suite,
            "op": self.op,
            "kernel": self.kernel,
            "case": self.case,
            "source": self.source,
            "id": self.id,
            "phase": self.phase,
            "verdict": self.verdict,
            "reason": self.reason,
        }
        if not self.suite:
            del line["suite"]
        if self.notes:
            line["notes"] = list(self.notes)
        line.update(self.figures)
        return line

    @property
    def key(self) -> VerdictKey:
        return self.kernel, self.op, self.id, self.phase

    @property
    def variants(self) -> list[str]:
        """Return the variants in which the case passed; none if it failed."""
        variants: list[str] = self.figures.get("variants", [])
        return variants

    @property
    def calls(self) -> dict[str, int]:
        """Return the ATen operators that the kernel called, and how often."""
        calls: dict[str, int] = self.figures.get("calls", {})
        return calls

    @property
    def ran(self) -> str:
        """Return how the call ran behind a native slot: replayed, C++ or Python; empty in runtime python."""
        return str(self.figures.get("ran", ""))

    @property
    def not_replayed(self) -> str:
        """Return why the call ran through Python behind a native slot; empty if it did not."""
        return str(self.figures.get("not_replayed", ""))

    @property
    def raised(self) -> bool:
        """Whether it passed because the kernel raised where ATen does."""
        return "raised" in self.figures

    @property
    def tolerated(self) -> bool:
        """Whether a tolerance decided, as the operator has no float64 form."""
        return "rtol" in self.figures

    @property
    def mutant_effect(self) -> str:
        """Return the effect of a mutant of ATen on the case; empty for other kernels."""
        return str(self.figures.get("mutant", ""))

    @property
    def kernel_error(self) -> float | None:
        return self.figures.get("kernel_error")

    @property
    def bound(self) -> float | None:
        return self.figures.get("bound")

    @property
    def timed(self) -> str:
        """Return the kind of the headline times, ``device`` or ``call``; empty in older runs."""
        return str(self.figures.get("timed", ""))

    @property
    def headline(self) -> TimeRecord | None:
        """Return the times that count; None if the case was not timed."""
        get = self.figures.get
        if (speedup := get("speedup")) is None:
            return None
        low, high = self.figures["speedup_low"], self.figures["speedup_high"]
        return TimeRecord(
            get("kernel_us"), get("aten_us"), speedup, low, high, get("rounds", 0), get("calls_per_round")
        )

    def times(self, kind: str) -> TimeRecord | None:
        """Return the times of a kind: device, call or sync; older runs have the headline only."""
        record = self.figures.get(kind)
        return TimeRecord.from_wire(record) if record else None

    @property
    def sol(self) -> SolRecord | None:
        record = self.figures.get("sol")
        return SolRecord.from_wire(record) if record else None

    @property
    def launch_bound(self) -> bool:
        return bool(self.figures.get("launch_bound"))

    @property
    def alarm(self) -> str:
        """Return why the time is not credible; empty if it is."""
        return self.figures.get("alarm") or ""
