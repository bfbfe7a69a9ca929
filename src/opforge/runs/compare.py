"""Compare two runs: operators that became wrong, right, slower or faster, came or went."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.judge.verdict import Outcome
from opforge.runs import change
from opforge.runs.change import Noise
from opforge.runs.comparable import IncomparableError, differences, finished_manifest, remarks
from opforge.runs.score import OperatorTally, Summary
from opforge.runs.speed import Ratio, Timed, geomean, over
from opforge.runs.store import read_rows

Key = tuple[str, str]
"""Id and phase of a case, within an operator or kernel."""
_MAX_REASONS = 5


class Became(enum.StrEnum):
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
class Speeds:
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
    became: Became
    before: str
    """A short description: ``right``, ``2 of 9 not right``, ``no kernel`` …"""
    after: str
    unchanged: bool
    """Whether its kernel's source is the same in both runs."""
    reasons: tuple[tuple[str, str, str], ...] = ()
    """Verdict, reason and case of some cases that failed only in the second run."""
    failing: int = 0
    """Number of cases that fail only in the second run."""
    speeds: Speeds | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs."""

    paths: tuple[str, str]
    manifests: tuple[dict[str, Any], dict[str, Any]]
    scores: tuple[dict[str, Any], dict[str, Any]]
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    units: int
    raced: int
    """Number of operators or kernels tested for a change of speed."""
    tests: int
    """Number of means and single cases tested for a change."""
    noise: dict[str, Noise]
    """Noise between the runs, of ``operators`` and of ``cases``."""
    moved: tuple[str, Ratio] | None
    """The unchanged kernel with the largest change of speed, with its plain 95 % interval."""
    things: str = "operators"
    unseen: float | None = None
    """The median share of speed that an operator could have lost or won without being reported."""

    def of(self, became: Became) -> list[Difference]:
        """Return the differences of one kind."""
        return [d for d in self.differences if d.became is became]

    def regressions(self, share: float | None) -> list[Difference]:
        """Return regressions: wrong now, gone though correct before, or slower.

        Slower means by more than ``share``, and counts only if a share is given.
        """
        lost = [d for d in self.differences if d.became is Became.WRONG]
        lost += [d for d in self.differences if d.became is Became.DISAPPEARED and d.before == "right"]
        if share is not None:
            lost += [d for d in self.differences if d.speeds is not None and d.speeds.slower_by(share)]
        return lost


@dataclass
class Side:
    """The data read from one run: its summary, its failed cases and its times."""

    manifest: dict[str, Any]
    summary: Summary
    wrong: dict[str, dict[Key, tuple[str, str, str]]] = field(default_factory=dict)
    times: dict[str, dict[Key, tuple[str, Timed]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Side:
        manifest = finished_manifest(path)
        side = cls(manifest, Summary.start(manifest))
        for row in read_rows(path):
            side._add(row)
        return side

    def _add(self, row: dict[str, Any]) -> None:
        self.summary.add(row)
        unit = row["kernel"] if row["kernel"] in self.summary.apart else row["op"]
        key = row["id"], row["phase"]
        if row["verdict"] != Outcome.PASSED:
            self.wrong.setdefault(unit, {})[key] = row["verdict"], row["reason"], row["case"]
        timed = Timed.of(row)
        if timed is not None and not timed.alarm:
            self.times.setdefault(unit, {})[key] = row["case"], timed

    @property
    def served(self) -> dict[str, OperatorTally]:
        return {t.unit: t for t in self.summary.judged}

    def state(self, unit: str) -> str:
        tally = self.served.get(unit)
        if tally is None:
            return "declined" if unit in self.summary.operators else "no kernel"
        return "right" if tally.right else f"{tally.total - tally.passed} of {tally.total} not right"


@dataclass
class Raced:
    """The speeds of all operators that are correct and timed in both runs."""

    speeds: dict[str, Speeds]
    noise: dict[str, Noise]
    tests: int
    moved: tuple[str, Ratio] | None


def compare(before: Path, after: Path, *, unchanged: bool = False) -> Comparison:
    """Compare a run with an earlier one; raises IncomparableError if they are not comparable.

    Kernels with the same source in both runs are used to estimate noise. They are not reported as
    slower or faster unless ``unchanged`` is set.
    """
    old, new = Side.read(before), Side.read(after)
    if reasons := list(differences(old.manifest, new.manifest)):
        raise IncomparableError(f"{str(before)!r} and {str(after)!r} cannot be compared: {'; '.join(reasons)}")
    same = same_source(old.manifest, new.manifest)
    raced = held(old, new, same, unchanged=unchanged)
    units = sorted({*old.served, *new.served})
    changes = (_difference(unit, old, new, unit in same, raced.speeds.get(unit)) for unit in units)
    return Comparison(
        (str(before), str(after)),
        (old.manifest, new.manifest),
        (old.summary.scores(), new.summary.scores()),
        tuple(sorted((d for d in changes if d is not None), key=lambda d: (list(Became).index(d.became), d.unit))),
        tuple(remarks(old.manifest, new.manifest)),
        len(units),
        len(raced.speeds),
        raced.tests,
        raced.noise,
        raced.moved,
        old.summary.things,
        statistics.median(1 - s.change.low / s.change.value for s in raced.speeds.values()) if raced.speeds else None,
    )


def same_source(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """Return the operators and kernels with the same source in both runs.

    Returns none if the versions of torch, Triton, NumPy or Python differ.
    """
    if any(one["versions"].get(name) != other["versions"].get(name) for name in ("torch", "triton", "numpy", "python")):
        return frozenset()
    mine, theirs = _digests(one), _digests(other)
    return frozenset(unit for unit, digest in mine.items() if theirs.get(unit) == digest)


def _digests(manifest: Mapping[str, Any]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for kernel in manifest["plan"]["kernels"]:
        units = [kernel["name"]] if "reference" in kernel else kernel["ops"]
        digests.update(dict.fromkeys(units, f"{kernel['name']} {kernel['digest']}"))
    return digests


def _difference(unit: str, old: Side, new: Side, same: bool, speeds: Speeds | None) -> Difference | None:
    """Return the change of one operator; None if no change is significant."""
    before, after = old.served.get(unit), new.served.get(unit)
    old_wrong, new_wrong = old.wrong.get(unit, {}), new.wrong.get(unit, {})
    failing = [finding for key, finding in new_wrong.items() if key not in old_wrong]
    states = old.state(unit), new.state(unit)

    def became(kind: Became) -> Difference:
        reasons = tuple(failing[:_MAX_REASONS]) if kind in (Became.WRONG, Became.APPEARED) else ()
        return Difference(unit, kind, *states, same, reasons, len(failing), speeds)

    if before is None or after is None:
        return became(Became.APPEARED if before is None else Became.DISAPPEARED)
    if failing:
        return became(Became.WRONG)
    if after.right and not before.right:
        return became(Became.RIGHT)
    if speeds is not None and speeds.surely_slower:
        return became(Became.SLOWER)
    if speeds is not None and speeds.surely_faster:
        return became(Became.FASTER)
    return None


def held(one: Side, other: Side, same: frozenset[str], *, unchanged: bool) -> Raced:
    """Return the speeds of operators that may have changed, and the noise between the runs.

    The operators are those that are correct and timed in both runs.
    """
    pairs = {unit: unit_pairs for unit in sorted(one.times) if (unit_pairs := list(_pairs(unit, one, other)))}
    changes = {
        unit: [change.drifted(over(b.speed, a.speed), a.aten_us, b.aten_us) for _, a, b in unit_pairs]
        for unit, unit_pairs in pairs.items()
    }
    means = {unit: mean for unit, parts in changes.items() if (mean := geomean(parts)) is not None}
    floor = change.FLOORS[_kind(pairs)]
    noise = {
        "operators": change.noise_of([m for unit, m in means.items() if unit in same], floor),
        "cases": change.noise_of([c for unit, parts in changes.items() if unit in same for c in parts], floor),
    }
    tested = [unit for unit in means if unchanged or unit not in same]
    tests = sum(1 if len(changes[unit]) == 1 else 1 + len(changes[unit]) for unit in tested)
    speeds = {unit: _of(pairs[unit], changes[unit], means[unit], noise, tests, unit in same) for unit in tested}
    controls = [(unit, mean) for unit, mean in means.items() if unit in same]
    moved = max(controls, key=lambda item: abs(math.log(item[1].value)), default=None)
    return Raced(speeds, noise, tests, moved)


def _pairs(unit: str, old: Side, new: Side) -> Iterator[tuple[str, Timed, Timed]]:
    """Yield the cases of an operator timed in both runs by the same method, with both times."""
    tallies = [side.served.get(unit) for side in (old, new)]
    if not all(tally is not None and tally.right for tally in tallies):
        return
    for key, (case, before) in old.times[unit].items():
        _, after = new.times.get(unit, {}).get(key, ("", None))
        if after is not None and after.of_device == before.of_device:
            yield case, before, after


def _kind(pairs: Mapping[str, list[tuple[str, Timed, Timed]]]) -> str:
    """Return the kind of the times: ``device`` if all are device times, else ``call``."""
    of_device = [before.of_device for unit_pairs in pairs.values() for _, before, _ in unit_pairs]
    return "device" if of_device and all(of_device) else "call"


def _of(
    pairs: list[tuple[str, Timed, Timed]],
    changes: list[Ratio],
    mean: Ratio,
    noise: Mapping[str, Noise],
    tests: int,
    among: bool,
) -> Speeds:
    before, after = geomean(a.speed for _, a, _ in pairs), geomean(b.speed for _, _, b in pairs)
    if before is None or after is None:
        raise ValueError("there is no speed of no cases")
    cases: list[CaseChange] = []
    if len(pairs) > 1:
        widened_changes = (change.widened(c, noise["cases"], tests, among=among) for c in changes)
        cases = [CaseChange(case, a.speed, b.speed, c) for (case, a, b), c in zip(pairs, widened_changes, strict=True)]
    return Speeds(
        before,
        after,
        change.widened(mean, noise["operators"], tests, among=among),
        len(pairs),
        tuple(c for c in cases if c.change.high < 1),
        tuple(c for c in cases if c.change.low > 1),
    )
