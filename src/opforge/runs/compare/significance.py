"""Change of speed between two runs, and its statistical significance.

The interval of a timed case covers the error of one race. Two runs of the same kernel differ by
more: another process, other memory, other load on the machine. This extra noise is estimated from
the kernels that did not change between the runs; with too few of them, a floor is used.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from opforge.runs.speed import Ratio

FALSE_ALARM = 0.01
"""Accepted probability that two runs of the same kernels report any change of speed."""
MIN_CONTROLS = 8
"""Minimum number of unchanged kernels from which the noise between two runs is estimated."""
MIN_NOISE = {"device": 0.005, "call": 0.03}
"""Minimum noise between two runs (standard deviation) of device times and of call times."""
DRIFT = 0.2
"""Fraction of a change in ATen's own time that may be a change of the ratio.

A busy core slows down two programs, but not equally.
"""
_Z95 = NormalDist().inv_cdf(0.975)
_NORMAL_MEDIAN_DEVIATION = NormalDist().inv_cdf(0.75)
"""Median absolute deviation of a normal distribution, in standard deviations."""
_MAX_STUDENT_FREEDOM = 200
"""Above this many degrees of freedom, Student's distribution is treated as the normal one."""
_MAX_NOISE = 2.0
"""Upper limit of the noise search: a factor of seven."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise between two runs beyond their races' intervals: a standard deviation of logarithms."""

    deviation: float
    control_deviations: tuple[float, ...] = ()
    """Changes of the unchanged kernels in standard deviations, largest first; empty if too few."""

    @property
    def control_count(self) -> int:
        """Return the number of unchanged kernels it was estimated from; 0 if it is the floor."""
        return len(self.control_deviations)

    def required_deviations(self, tests: int, *, is_control: bool = False) -> float:
        """Return how many standard deviations a change needs to be no false alarm in all tests."""
        share = FALSE_ALARM / max(1, tests)
        normal = student_quantile(1 - share / 2, min(max(self.control_count, MIN_CONTROLS) - 1, _MAX_STUDENT_FREEDOM))
        if not self.control_deviations:
            return normal
        rank = max(1, math.floor(share * (self.control_count + 1)))
        return max(normal, self.control_deviations[rank if is_control else rank - 1])


def estimate_noise(controls: Sequence[Ratio], floor: float) -> Noise:
    """Return the noise that makes the median deviation of the unchanged kernels the expected one.

    The median is robust to a few that did change in a way their source does not show.
    """
    if len(controls) < MIN_CONTROLS:
        return Noise(floor)
    low, high = floor, _MAX_NOISE
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if statistics.median(_deviations(controls, middle)) > _NORMAL_MEDIAN_DEVIATION
            else (low, middle)
        )
    return Noise(high, tuple(sorted(_deviations(controls, high), reverse=True)))


def _deviations(changes: Iterable[Ratio], noise: float) -> list[float]:
    """Return the distances of changes from none, in standard deviations."""
    return [abs(math.log(c.value)) / math.hypot(_standard_error(c), noise) for c in changes]


def _standard_error(change: Ratio) -> float:
    """Return the standard deviation on the side towards no change."""
    end = change.high if change.value < 1 else change.low
    return abs(math.log(change.value / end)) / _Z95


def widen_by_drift(change: Ratio, before_us: float | None, after_us: float | None) -> Ratio:
    """Return a change with its 95 % interval widened by the change in ATen's own time.

    A change in ATen's time means that the machine differed.
    """
    if not before_us or not after_us:
        return change
    drift = DRIFT * abs(math.log(after_us / before_us)) * _Z95
    below = math.hypot(math.log(change.value / change.low), drift)
    above = math.hypot(math.log(change.high / change.value), drift)
    return Ratio(change.value, change.value * math.exp(-below), change.value * math.exp(above))


def widen(change: Ratio, noise: Noise, tests: int, *, is_control: bool = False) -> Ratio:
    """Return a change with an interval that holds for all tests at once.

    The interval includes the noise between runs.
    """
    deviations = noise.required_deviations(tests, is_control=is_control)
    below = math.hypot(math.log(change.value / change.low) / _Z95, noise.deviation) * deviations
    above = math.hypot(math.log(change.high / change.value) / _Z95, noise.deviation) * deviations
    return Ratio(change.value, change.value * math.exp(-below), change.value * math.exp(above))


@functools.cache
def student_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's distribution for a share above a half.

    It accounts for the error of noise that was estimated from few kernels.
    """
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees_of_freedom) < probability else (low, middle)
    return high


def _student_cdf(value: float, freedom: int) -> float:
    """Return the cumulative share of Student's distribution below a value, by its finite series."""
    angle = math.atan2(value, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = sine * (math.cos(angle) if odd else 1.0)
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = (angle + total) * 2 / math.pi if odd else total
    return 0.5 + inside / 2
