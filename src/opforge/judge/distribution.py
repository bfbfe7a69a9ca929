"""Random operators are judged by their distribution: a battery of tests whose false-alarm rate is stated for the whole of it.

Every test has one form. Draws of the kernel and draws of ATen are paired, something is measured on each, and the
differences are added up. If both draw from one distribution, each difference is as likely as its negative, so the sum
exceeds ``z`` times the root of the sum of squares with probability 2 exp(-z²/2) at most: for any distribution and any
number of draws, without a limit theorem. The level of one test is the battery's divided by the number of tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from opforge.judge.numerics import same_bytes

FALSE_ALARM = 1e-6
"""How often an honest kernel is turned down, per case."""
ENOUGH = 200_000
"""Elements that are looked at, of each side and each result."""
MOST_DRAWS = 2000
FEWEST_DRAWS = 128
SOME_DRAWS = 256
"""The fewest for tensors of up to so many elements as ``SMALL``."""
SMALL = 8192
PILOTS = 64
"""Draws of ATen's that are in no test: they show how its positions differ."""
GROUP = 4
"""Draws come in groups: a seed, a second call under it, the next seed, a second call under that."""


def draws_wanted(elements: int) -> int:
    """Return how many draws a tensor of so many elements needs, a multiple of the group."""
    fewest = SOME_DRAWS if elements <= SMALL else FEWEST_DRAWS
    wanted = min(MOST_DRAWS, max(fewest, math.ceil(ENOUGH / max(1, elements))))
    return wanted - wanted % GROUP


def positions(elements: int, draws: int) -> torch.Tensor:
    """Return which elements of a draw are looked at: all, or runs of neighbours spread over it, both ends among them."""
    room, run = max(64, ENOUGH // draws), 32
    if elements <= room:
        return torch.arange(elements)
    starts = torch.linspace(0, elements - run, room // run).long()
    return (starts[:, None] + torch.arange(run)).reshape(-1).unique()


def identical(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
    """Whether a draw is ATen's own, to the bit."""
    return kernel.shape == aten.shape and same_bytes(kernel, aten.detach().cpu().resolve_conj().resolve_neg())


@dataclass(frozen=True, slots=True)
class Sample:
    """Draws of one result: a row for each draw, a column for each element that is looked at."""

    kernel: torch.Tensor
    aten: torch.Tensor
    pilot: torch.Tensor
    at: torch.Tensor
    """The flat position of each column in the result."""
    row: int
    """The length of the result's last dimension: elements so far apart are neighbours too."""
    kernel_totals: torch.Tensor
    """The mean of each whole draw."""
    aten_totals: torch.Tensor

    @property
    def step(self) -> float:
        """The rounding step of the dtype; 0 for integers."""
        return float(torch.finfo(self.kernel.dtype).eps) if self.kernel.is_floating_point() else 0.0


@dataclass(frozen=True, slots=True)
class Test:
    """Sums of differences, what their size is judged by, and words for each of them."""

    excess: torch.Tensor
    """How far each sum lies beyond what rounding explains."""
    spread: torch.Tensor
    """The root of the sum of squared differences."""
    say: Callable[[int], str]
    """What is off, for the test with this index."""

    @property
    def z(self) -> torch.Tensor:
        return torch.where(self.excess > 0, self.excess / self.spread.clamp(min=1e-300), 0.0)


def paired(kernel: torch.Tensor, aten: torch.Tensor, say: Callable[[int], str], slack: float = 0.0) -> Test:
    """Return a test of measurements, a row for each draw; ``slack`` is a mean difference that rounding explains."""
    kernel, aten = kernel.reshape(len(kernel), -1), aten.reshape(len(aten), -1)
    differences = kernel - aten
    excess = differences.sum(0).abs() - slack * len(differences)
    return Test(excess.clamp(min=0), differences.square().sum(0).sqrt(), say)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What came of a battery."""

    reason: str | None
    """What is off; None when nothing is."""
    figures: dict[str, Any]


def weigh(tests: Iterable[Test], false_alarm: float = FALSE_ALARM) -> Weighed:
    """Judge all tests together, so that an honest kernel fails any of them no more often than ``false_alarm``."""
    tests = [test for test in tests if test.excess.numel()]
    count = sum(test.excess.numel() for test in tests)
    if not count:
        return Weighed(None, {})
    limit = math.sqrt(2 * math.log(2 * count / false_alarm))
    largest = max(float(test.z.max()) for test in tests)
    figures = {"tests": count, "z": round(largest, 3), "z_limit": round(limit, 3), "false_alarm": false_alarm}
    failed = next((test for test in tests if float(test.z.max()) > limit), None)
    if failed is None:
        return Weighed(None, figures)
    words = failed.say(int(failed.z.argmax()))
    return Weighed(f"{words} (z = {float(failed.z.max()):.1f}, allowed {limit:.1f})", figures)
