"""Implementations of one operator side by side.

Shows verdicts, speed against the reference, and speed against the fastest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opforge.reports import speed_text
from opforge.runs.manifest import Manifest
from opforge.runs.score import OperatorTally, Summary
from opforge.runs.speed import Ratio, divide


@dataclass(frozen=True, slots=True)
class Implementation:
    """One row of the comparison."""

    tally: OperatorTally
    reference: str
    speed_vs_fastest: Ratio | None
    """Speed relative to the fastest right implementation.

    None for the fastest one itself, and if nothing was timed.
    """
    is_fastest: bool

    @property
    def fastest_cell(self) -> str:
        if self.is_fastest:
            return "fastest"
        return "" if self.speed_vs_fastest is None else speed_text.ratio_text(self.speed_vs_fastest)


def compare_implementations(manifest: Manifest, summary: Summary) -> list[Implementation]:
    """Return the implementations by custom operator, the fastest first, wrong ones last."""
    references = {k.name: k.reference for k in manifest.plan.kernels if k.reference is not None}
    by_op: dict[str, list[OperatorTally]] = {}
    for tally in summary.judged:
        if tally.per_kernel:
            by_op.setdefault(tally.op, []).append(tally)
    return [row for _, tallies in sorted(by_op.items()) for row in _rows_of_operator(tallies, references)]


def _rows_of_operator(tallies: list[OperatorTally], references: dict[str, str]) -> Iterator[Implementation]:
    ordered = sorted(tallies, key=lambda t: (not t.is_correct, -_value(t), t.kernel))
    fastest = ordered[0] if len(ordered) > 1 and _speed(ordered[0]) is not None else None
    for tally in ordered:
        yield Implementation(tally, references[tally.kernel], _speed_relative_to(tally, fastest), tally is fastest)


def _speed_relative_to(tally: OperatorTally, fastest: OperatorTally | None) -> Ratio | None:
    """Return the speed of one relative to the other, if both were timed on the same cases."""
    if fastest is None or tally is fastest or len(tally.times) != len(fastest.times):
        return None
    own_speed, fastest_speed = _speed(tally), _speed(fastest)
    return None if own_speed is None or fastest_speed is None else divide(own_speed, fastest_speed)


def _speed(tally: OperatorTally) -> Ratio | None:
    return tally.speed or tally.launch_speed


def _value(tally: OperatorTally) -> float:
    ratio = _speed(tally)
    return 0.0 if ratio is None else ratio.value
