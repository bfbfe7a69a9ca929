"""The interval of the performance score covers the truth as often as it says: simulated with a seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary

CASES = {"a.x": 1, "b.x": 3, "c.x": 2, "d.x": 5, "e.x": 1}
TIMES = 2000


def median_ranks(count: int) -> tuple[int, int]:
    """Return the ranks between which the median lies 95 times in a hundred, from the binomial distribution itself."""
    below = 0.0
    rank = 0
    while below + math.comb(count, rank) / 2**count <= 0.025:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return rank - 1, count - rank


def by_spread(chance: np.random.Generator, truth: float) -> tuple[float, float, float]:
    """Return a measurement whose spread is known: estimate and 1.96 deviations either side."""
    deviation = chance.uniform(0.01, 0.3)
    value = truth + deviation * chance.standard_normal()
    return value, value - 1.96 * deviation, value + 1.96 * deviation


def by_rounds(chance: np.random.Generator, truth: float) -> tuple[float, float, float]:
    """Return what rounds give: the median of skewed ratios, and an interval from their order."""
    count = int(chance.integers(12, 80))
    scale = chance.uniform(0.01, 0.3)
    sample = np.sort(truth + chance.exponential(scale, count) - scale * math.log(2))  # whose median is the truth
    low, high = median_ranks(count)
    return float(np.median(sample)), float(sample[low]), float(sample[high])


def coverage(measure, seed: int) -> float:
    chance = np.random.default_rng(seed)
    manifest = {"config": {"p": 1.0}, "plan": {"missing": [], "optional": [], "operators": len(CASES)}}
    covered = 0
    for _ in range(TIMES):
        rows, logs = [], []
        for op, count in CASES.items():
            truths = chance.normal(0.0, 1.0, count)
            logs.append(truths.mean())
            for truth in truths:
                value, low, high = (math.exp(x) for x in measure(chance, truth))
                times = {"speedup": value, "speedup_low": low, "speedup_high": high}
                rows.append({"op": op, "kernel": "k", "verdict": "passed", "reason": "", **times})
        low, high = Summary.from_rows(Manifest.from_wire(manifest), map(ResultRow.from_wire, rows)).performance_interval
        covered += low <= math.exp(np.mean(logs)) <= high
    return covered / TIMES


def test_the_interval_covers_the_truth_as_often_as_it_says():
    assert 0.935 <= coverage(by_spread, seed=1) <= 0.965


@pytest.mark.slow
def test_the_interval_of_skewed_rounds_covers_the_truth():
    assert 0.935 <= coverage(by_rounds, seed=2) <= 0.985


@pytest.mark.parametrize("count", [12, 40])
def test_many_operators_are_known_better_than_one(count):
    """A bound that added the ends up would not narrow."""
    row = {
        "kernel": "k",
        "verdict": "passed",
        "reason": "",
        "speedup": 1.0,
        "speedup_low": 0.9,
        "speedup_high": 1 / 0.9,
    }
    manifest = {"config": {"p": 1.0}, "plan": {"missing": [], "optional": [], "operators": count}}
    rows = [ResultRow.from_wire({"op": f"op{n}.x", **row}) for n in range(count)]
    low, high = Summary.from_rows(Manifest.from_wire(manifest), rows).performance_interval
    assert math.log(high) == pytest.approx(-math.log(0.9) / math.sqrt(count))
    assert math.log(low) == pytest.approx(math.log(0.9) / math.sqrt(count))
