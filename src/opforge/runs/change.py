"""How much speed has changed between two runs, and how much of that is surely no chance.

The interval of a timed case says how well one race knows its ratio. Two runs of the same kernel differ by more: another
process, other memory, other neighbours on the machine. How much more is learnt from the kernels that have not changed from
one run to the other, and a floor stands for it where there are too few of them.
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
"""How often two runs of the same kernels may name anything at all as slower or faster."""
CONTROLS = 8
"""So many unchanged ones it takes to learn the noise between two runs from them."""
FLOORS = {"device": 0.005, "call": 0.03}
"""The least noise between two runs, as a standard deviation: of device times and of call times."""
DRIFT = 0.2
"""What part of a change in ATen's own time may be a change of the ratio: a busy core slows down two programs, and not alike."""
_Z95 = NormalDist().inv_cdf(0.975)
_QUARTILE = NormalDist().inv_cdf(0.75)
"""Half of all deviations of a normal distribution are larger than so many standard deviations."""
_PLENTY = 200
"""With more degrees of freedom Student's distribution is the normal one as far as it matters."""
_MOST = 2.0
"""Noise beyond a factor of seven is not looked for."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What two runs of the same kernel differ by beside the intervals of their races: a standard deviation of logarithms."""

    deviation: float
    outliers: tuple[float, ...] = ()
    """How far the unchanged ones have moved, in standard deviations, the farthest first; none where there are too few to learn from."""

    @property
    def controls(self) -> int:
        """Return from how many unchanged ones it was learnt; 0 where it is the floor."""
        return len(self.outliers)

    def sure(self, tests: int, *, among: bool = False) -> float:
        """Return how many standard deviations a change must have, for none of so many tests to be a false alarm.

        Student's distribution says so for noise that is normal. Noise of a busy machine is not: so a change must also be
        larger than those of the unchanged ones, all of them where there are not hundreds. ``among`` is for one that is
        among them itself.
        """
        share = FALSE_ALARM / max(1, tests)
        normal = student(1 - share / 2, min(max(self.controls, CONTROLS) - 1, _PLENTY))
        if not self.outliers:
            return normal
        rank = max(1, math.floor(share * (self.controls + 1)))
        return max(normal, self.outliers[rank if among else rank - 1])


def noise_of(controls: Sequence[Ratio], floor: float) -> Noise:
    """Return the noise that makes half of the unchanged ones deviate by as much as half of them should.

    The median is not moved by a few that did change, in something that their source does not show.
    """
    if len(controls) < CONTROLS:
        return Noise(floor)
    low, high = floor, _MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.median(_moved(controls, middle)) > _QUARTILE else (low, middle)
    return Noise(high, tuple(sorted(_moved(controls, high), reverse=True)))


def _moved(changes: Iterable[Ratio], noise: float) -> list[float]:
    """Return how far changes are from none, in standard deviations."""
    return [abs(math.log(c.value)) / math.hypot(_deviation(c), noise) for c in changes]


def _deviation(change: Ratio) -> float:
    """Return the standard deviation on the side on which there would be no change."""
    end = change.high if change.value < 1 else change.low
    return abs(math.log(change.value / end)) / _Z95


def drifted(change: Ratio, before_us: float | None, after_us: float | None) -> Ratio:
    """Return a change with its 95 % interval widened by what ATen's own time says: where that differs, so did the machine."""
    if not before_us or not after_us:
        return change
    drift = DRIFT * abs(math.log(after_us / before_us)) * _Z95
    below = math.hypot(math.log(change.value / change.low), drift)
    above = math.hypot(math.log(change.high / change.value), drift)
    return Ratio(change.value, change.value * math.exp(-below), change.value * math.exp(above))


def widened(change: Ratio, noise: Noise, tests: int, *, among: bool = False) -> Ratio:
    """Return a change with an interval that holds for all of so many tests at once, noise between runs included."""
    sure = noise.sure(tests, among=among)
    below = math.hypot(math.log(change.value / change.low) / _Z95, noise.deviation) * sure
    above = math.hypot(math.log(change.high / change.value) / _Z95, noise.deviation) * sure
    return Ratio(change.value, change.value * math.exp(-below), change.value * math.exp(above))


@functools.cache
def student(share: float, freedom: int) -> float:
    """Return the value below which Student's distribution lies with a share above a half: noise that was learnt from few is not known well."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < share else (low, middle)
    return high


def _student_below(value: float, freedom: int) -> float:
    """Return the share of Student's distribution below a value, by its finite series."""
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
