"""Compare two runs: operators that became wrong, right, slower or faster, came or went."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.judge.verdict import VerdictKind
from opforge.runs.compare import significance as change
from opforge.runs.compare.compatible import IncomparableError, finished_manifest, incompatibilities, other_differences
from opforge.runs.compare.significance import Noise
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import OperatorTally, Summary
from opforge.runs.speed import CaseSpeed, Ratio, divide, geomean
from opforge.runs.store import read_rows

CaseKey = tuple[str, str]
"""Id and phase of a case, within an operator or kernel."""
_MAX_REASONS = 5


class ChangeKind(enum.StrEnum):
    """The kinds of change of an operator."""

    WRONG = "wrong"
    DISAPPEARED = "disappeared"
    SLOWER = "slower"
    RIGHT = "right"
    FASTER = "faster"
    APPEARED = "appeared"


@dataclass(frozen=True, slots=True)
class CaseChange:
    """A timed case with a significant change of speed."""

    case: str
    before: Ratio
    after: Ratio
    change: Ratio
    """New speed over old speed, with its widened interval."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """An operator's old and new speed, over the cases timed in both runs."""

    before: Ratio
    after: Ratio
    change: Ratio
    """New speed over old speed; the interval holds for all operators and cases at once."""
    cases: int
    slower: tuple[CaseChange, ...] = ()
    faster: tuple[CaseChange, ...] = ()
    """Single cases with a significant change."""

    @property
    def surely_slower(self) -> bool:
        return self.change.high < 1 or bool(self.slower)

    @property
    def surely_faster(self) -> bool:
        return self.change.low > 1 or bool(self.faster)

    def slower_by(self, share: float) -> bool:
        """Whether the operator, or one of its cases, surely lost more than a share of its speed."""
        return any(c.high < 1 - share for c in (self.change, *(s.change for s in self.slower)))


@dataclass(frozen=True, slots=True)
class Difference:
    """A changed operator, or kernel if those are scored separately."""

    unit: str
    kind: ChangeKind
    before: str
    """A short description: ``right``, ``2 of 9 not right``, ``no kernel`` …"""
    after: str
    same_source: bool
    """Whether its kernel's source is the same in both runs."""
    reasons: tuple[tuple[str, str, str], ...] = ()
    """Verdict, reason and case of some cases that failed only in the second run."""
    failing: int = 0
    """Number of cases that fail only in the second run."""
    speeds: SpeedChange | None = None


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of two runs."""

    paths: tuple[str, str]
    manifests: tuple[Manifest, Manifest]
    scores: tuple[dict[str, Any], dict[str, Any]]
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    units: int
    timed_units: int
    """Number of operators or kernels tested for a change of speed."""
    tests: int
    """Number of means and single cases tested for a change."""
    noise: dict[str, Noise]
    """Noise between the runs, of ``operators`` and of ``cases``."""
    largest_control_change: tuple[str, Ratio] | None
    """The unchanged kernel with the largest change of speed, with its plain 95 % interval."""
    unit_noun: str = "operators"
    undetectable_change: float | None = None
    """The median share of speed that an operator could have lost or won without being reported."""

    def of_kind(self, kind: ChangeKind) -> list[Difference]:
        """Return the differences of one kind."""
        return [d for d in self.differences if d.kind is kind]

    def regressions(self, share: float | None) -> list[Difference]:
        """Return regressions: wrong now, gone though correct before, or slower.

        Slower means by more than ``share``, and counts only if a share is given.
        """
        lost = [d for d in self.differences if d.kind is ChangeKind.WRONG]
        lost += [d for d in self.differences if d.kind is ChangeKind.DISAPPEARED and d.before == "right"]
        if share is not None:
            lost += [d for d in self.differences if d.speeds is not None and d.speeds.slower_by(share)]
        return lost


@dataclass
class RunData:
    """The data read from one run: its summary, its failed cases and its times."""

    manifest: Manifest
    summary: Summary
    failures: dict[str, dict[CaseKey, tuple[str, str, str]]] = field(default_factory=dict)
    times: dict[str, dict[CaseKey, tuple[str, CaseSpeed]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RunData:
        manifest = finished_manifest(path)
        side = cls(manifest, Summary.start(manifest))
        for row in read_rows(path):
            side._add(row)
        return side

    def _add(self, row: ResultRow) -> None:
        self.summary.add(row)
        unit = self.summary.unit_of(row)
        key = row.id, row.phase
        if row.verdict != VerdictKind.PASSED:
            self.failures.setdefault(unit, {})[key] = row.verdict, row.reason, row.case
        timed = CaseSpeed.from_row(row)
        if timed is not None and not timed.alarm:
            self.times.setdefault(unit, {})[key] = row.case, timed

    @property
    def tallies(self) -> dict[str, OperatorTally]:
        return {t.unit: t for t in self.summary.judged}

    def describe(self, unit: str) -> str:
        tally = self.tallies.get(unit)
        if tally is None:
            return "declined" if unit in self.summary.operators else "no kernel"
        return "right" if tally.is_correct else f"{tally.total - tally.passed} of {tally.total} not right"


@dataclass
class SpeedChanges:
    """The speeds of all operators that are correct and timed in both runs."""

    speeds: dict[str, SpeedChange]
    noise: dict[str, Noise]
    tests: int
    largest_control_change: tuple[str, Ratio] | None


def compare(before: Path, after: Path, *, report_unchanged: bool = False) -> RunComparison:
    """Compare a run with an earlier one; raises IncomparableError if they are not comparable.

    Kernels with the same source in both runs are used to estimate noise. They are not reported as
    slower or faster unless ``report_unchanged`` is set.
    """
    old, new = RunData.read(before), RunData.read(after)
    if reasons := list(incompatibilities(old.manifest, new.manifest)):
        raise IncomparableError(f"{str(before)!r} and {str(after)!r} cannot be compared: {'; '.join(reasons)}")
    same = same_source(old.manifest, new.manifest)
    raced = speed_changes(old, new, same, report_unchanged=report_unchanged)
    units = sorted({*old.tallies, *new.tallies})
    changes = (_difference(unit, old, new, unit in same, raced.speeds.get(unit)) for unit in units)
    return RunComparison(
        (str(before), str(after)),
        (old.manifest, new.manifest),
        (old.summary.scores(), new.summary.scores()),
        tuple(sorted((d for d in changes if d is not None), key=lambda d: (list(ChangeKind).index(d.kind), d.unit))),
        tuple(other_differences(old.manifest, new.manifest)),
        len(units),
        len(raced.speeds),
        raced.tests,
        raced.noise,
        raced.largest_control_change,
        old.summary.unit_noun,
        statistics.median(1 - s.change.low / s.change.value for s in raced.speeds.values()) if raced.speeds else None,
    )


def same_source(before: Manifest, after: Manifest) -> frozenset[str]:
    """Return the operators and kernels with the same source in both runs.

    Returns none if the versions of torch, Triton, NumPy or Python differ.
    """
    if any(before.versions.get(name) != after.versions.get(name) for name in ("torch", "triton", "numpy", "python")):
        return frozenset()
    mine, theirs = _digests(before), _digests(after)
    return frozenset(unit for unit, digest in mine.items() if theirs.get(unit) == digest)


def _digests(manifest: Manifest) -> dict[str, str]:
    digests: dict[str, str] = {}
    for kernel in manifest.plan.kernels:
        units = kernel.ops if kernel.reference is None else (kernel.name,)
        digests.update(dict.fromkeys(units, f"{kernel.name} {kernel.digest}"))
    return digests


def _difference(unit: str, old: RunData, new: RunData, same: bool, speeds: SpeedChange | None) -> Difference | None:
    """Return the change of one operator; None if no change is significant."""
    before, after = old.tallies.get(unit), new.tallies.get(unit)
    old_wrong, new_wrong = old.failures.get(unit, {}), new.failures.get(unit, {})
    failing = [finding for key, finding in new_wrong.items() if key not in old_wrong]
    states = old.describe(unit), new.describe(unit)

    def became(kind: ChangeKind) -> Difference:
        reasons = tuple(failing[:_MAX_REASONS]) if kind in (ChangeKind.WRONG, ChangeKind.APPEARED) else ()
        return Difference(unit, kind, *states, same, reasons, len(failing), speeds)

    if before is None or after is None:
        return became(ChangeKind.APPEARED if before is None else ChangeKind.DISAPPEARED)
    if failing:
        return became(ChangeKind.WRONG)
    if after.is_correct and not before.is_correct:
        return became(ChangeKind.RIGHT)
    if speeds is not None and speeds.surely_slower:
        return became(ChangeKind.SLOWER)
    if speeds is not None and speeds.surely_faster:
        return became(ChangeKind.FASTER)
    return None


def speed_changes(before: RunData, after: RunData, same: frozenset[str], *, report_unchanged: bool) -> SpeedChanges:
    """Return the speeds of operators that may have changed, and the noise between the runs.

    The operators are those that are correct and timed in both runs.
    """
    pairs = {unit: unit_pairs for unit in sorted(before.times) if (unit_pairs := list(_pairs(unit, before, after)))}
    changes = {
        unit: [change.widen_by_drift(divide(b.speed, a.speed), a.aten_us, b.aten_us) for _, a, b in unit_pairs]
        for unit, unit_pairs in pairs.items()
    }
    means = {unit: mean for unit, parts in changes.items() if (mean := geomean(parts)) is not None}
    floor = change.MIN_NOISE[_kind(pairs)]
    noise = {
        "operators": change.estimate_noise([m for unit, m in means.items() if unit in same], floor),
        "cases": change.estimate_noise([c for unit, parts in changes.items() if unit in same for c in parts], floor),
    }
    tested = [unit for unit in means if report_unchanged or unit not in same]
    tests = sum(1 if len(changes[unit]) == 1 else 1 + len(changes[unit]) for unit in tested)
    speeds = {
        unit: _speed_change(pairs[unit], changes[unit], means[unit], noise, tests, unit in same) for unit in tested
    }
    controls = [(unit, mean) for unit, mean in means.items() if unit in same]
    moved = max(controls, key=lambda item: abs(math.log(item[1].value)), default=None)
    return SpeedChanges(speeds, noise, tests, moved)


def _pairs(unit: str, old: RunData, new: RunData) -> Iterator[tuple[str, CaseSpeed, CaseSpeed]]:
    """Yield the cases of an operator timed in both runs by the same method, with both times."""
    tallies = [side.tallies.get(unit) for side in (old, new)]
    if not all(tally is not None and tally.is_correct for tally in tallies):
        return
    for key, (case, before) in old.times[unit].items():
        _, after = new.times.get(unit, {}).get(key, ("", None))
        if after is not None and after.is_device_time == before.is_device_time:
            yield case, before, after


def _kind(pairs: Mapping[str, list[tuple[str, CaseSpeed, CaseSpeed]]]) -> str:
    """Return the kind of the times: ``device`` if all are device times, else ``call``."""
    of_device = [before.is_device_time for unit_pairs in pairs.values() for _, before, _ in unit_pairs]
    return "device" if of_device and all(of_device) else "call"


def _speed_change(
    pairs: list[tuple[str, CaseSpeed, CaseSpeed]],
    changes: list[Ratio],
    mean: Ratio,
    noise: Mapping[str, Noise],
    tests: int,
    is_control: bool,
) -> SpeedChange:
    before, after = geomean(a.speed for _, a, _ in pairs), geomean(b.speed for _, _, b in pairs)
    if before is None or after is None:
        raise ValueError("no cases to take a speed of")
    cases: list[CaseChange] = []
    if len(pairs) > 1:
        widened_changes = (change.widen(c, noise["cases"], tests, is_control=is_control) for c in changes)
        cases = [CaseChange(case, a.speed, b.speed, c) for (case, a, b), c in zip(pairs, widened_changes, strict=True)]
    return SpeedChange(
        before,
        after,
        change.widen(mean, noise["operators"], tests, is_control=is_control),
        len(pairs),
        tuple(c for c in cases if c.change.high < 1),
        tuple(c for c in cases if c.change.low > 1),
    )
