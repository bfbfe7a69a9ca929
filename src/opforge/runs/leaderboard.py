"""Rankings of several runs on the same cases and device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opforge.errors import OpforgeError, RunDirectoryError
from opforge.runs.compare.compatible import comparison_key, describe_suite, device_name, finished_manifest
from opforge.runs.manifest import Manifest
from opforge.runs.score import OperatorTally, Summary
from opforge.runs.speed import Ratio, geomean
from opforge.runs.store import MANIFEST, read_rows

RANKING_SCORES = ("correctness", "performance", "common", "perf_at_p", "coverage")
"""The scores to rank by."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A run on a board."""

    name: str
    """The name of its folder."""
    path: str
    manifest: Manifest
    summary: Summary
    common: Ratio | None = None
    """The geometric mean over the operators that every run of the board has correct and timed."""

    @property
    def tallies(self) -> dict[str, OperatorTally]:
        return {t.unit: t for t in self.summary.judged}

    def score(self, order: str) -> Ratio | None:
        """Return a score with its interval; counted scores have an interval of zero width."""
        if order == "common":
            return self.common
        if order == "performance":
            return self.summary.speed
        if order == "perf_at_p":
            share = self.summary.perf_at(self.summary.p)
            return None if share is None else Ratio(share.value, share.low, share.high)
        value = self.summary.correctness if order == "correctness" else self.summary.coverage
        return Ratio(value, value, value)


@dataclass(frozen=True, slots=True)
class Board:
    """Runs on the same cases and device, best first."""

    suite: str
    digest: str
    device: str
    entries: tuple[Entry, ...]
    ranks: tuple[int, ...]
    """One more than the number of surely better runs: runs with overlapping intervals tie."""
    operators: tuple[str, ...]
    """All operators that any of the runs has a verdict on or should have."""
    common: int
    """Number of operators that every run has correct and timed."""
    setting_differences: str = ""
    """Relevant differences between the runs: the p of perf@p, or torch."""


@dataclass(frozen=True, slots=True)
class Leaderboard:
    """All boards, the one with most runs first, and the excluded runs."""

    boards: tuple[Board, ...]
    excluded: tuple[tuple[str, str], ...]
    """Folder and reason."""
    order: str


def leaderboard(folders: Iterable[Path], order: str = RANKING_SCORES[0]) -> Leaderboard:
    """Return the boards of the runs in some folders; each folder is a run or holds runs."""
    if order not in RANKING_SCORES:
        raise OpforgeError(f"cannot rank by {order!r}; allowed: {', '.join(RANKING_SCORES)}")
    groups: dict[tuple[str, str], list[Entry]] = {}
    left_out: list[tuple[str, str]] = []
    paths = find_runs(folders)
    for path in paths:
        try:
            manifest = finished_manifest(path)
        except RunDirectoryError as error:
            left_out.append((str(path), str(error)))
            continue
        if not comparison_key(manifest)[0]:
            left_out.append(
                (str(path), "its manifest has no digest of the suite: it comes from an older opforge; run it again")
            )
            continue
        entry = Entry(path.resolve().name, str(path), manifest, Summary.from_rows(manifest, read_rows(path)))
        groups.setdefault(comparison_key(manifest), []).append(entry)
    boards = sorted((_board(entries, order) for entries in groups.values()), key=lambda b: (-len(b.entries), b.suite))
    return Leaderboard(tuple(boards), tuple(left_out), order)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the runs in some folders, each once."""
    runs: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunDirectoryError(f"{str(folder)!r} is not a folder")
        paths = [folder] if (folder / MANIFEST).is_file() else sorted(p.parent for p in folder.glob(f"*/{MANIFEST}"))
        if not paths:
            raise RunDirectoryError(f"{str(folder)!r} holds no run: neither {MANIFEST} nor folders that have one")
        for path in paths:
            runs.setdefault(path.resolve(), path)
    return list(runs.values())


def _board(entries: list[Entry], order: str) -> Board:
    first = entries[0].manifest
    common = _common(entries)
    scored = [
        Entry(
            e.name, e.path, e.manifest, e.summary, geomean(s for u in common if (s := e.tallies[u].speed) is not None)
        )
        for e in entries
    ]
    ranked = sorted(scored, key=lambda e: (-_value(e, order), -e.summary.correctness, e.name))
    operators = {u for e in scored for u in (*e.tallies, *e.summary.missing, *e.summary.declined)}
    return Board(
        describe_suite(first),
        comparison_key(first)[0],
        device_name(first),
        tuple(ranked),
        tuple(1 + sum(_surely_better(other, e, order) for other in ranked) for e in ranked),
        tuple(sorted(operators)),
        len(common),
        "; ".join(_differing(scored)),
    )


def _common(entries: list[Entry]) -> list[str]:
    timed = [{unit for unit, tally in e.tallies.items() if tally.speed is not None} for e in entries]
    return sorted(set.intersection(*timed))


def _value(entry: Entry, order: str) -> float:
    score = entry.score(order)
    return -1.0 if score is None else score.value


def _surely_better(one: Entry, other: Entry, order: str) -> bool:
    mine, theirs = one.score(order), other.score(order)
    if mine is None or theirs is None:
        return mine is not None
    return mine.low > theirs.high


def _differing(entries: list[Entry]) -> Iterable[str]:
    for setting, values in {
        "torch": {str(e.manifest.versions["torch"]) for e in entries},
        "the p of perf@p": {f"{e.summary.p:g}" for e in entries},
    }.items():
        if len(values) > 1:
            yield f"{setting} differs: {', '.join(sorted(values))}"
