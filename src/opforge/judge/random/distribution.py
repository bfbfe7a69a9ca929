"""Judge random operators by their distribution, with one false-alarm rate for all tests together.

Every test has the same form. Draws of the kernel and of ATen are paired, a quantity is measured on
each, and the differences are summed. If both draw from one distribution, each difference is as
likely as its negative. The sum then exceeds ``z`` times the root of the sum of squares with
probability 2 exp(-z²/2) at most. This holds for any distribution and any number of draws, without
a limit theorem. The level of one test is the level of all divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.tensors import same_bytes

FALSE_ALARM_RATE = 1e-6
"""Probability of rejecting an honest kernel, per case."""
SAMPLED_ELEMENTS = 200_000
"""Elements sampled from each side and each result."""
MAX_DRAWS = 2000
MIN_DRAWS = 128
MIN_SMALL_DRAWS = 256
"""Minimum for tensors of up to ``SMALL`` elements."""
MAX_SMALL_ELEMENTS = 8192
PILOT_DRAWS = 64
"""Draws of ATen that are in no test: they show how its positions differ."""
DRAWS_PER_GROUP = 4
"""Draws come in groups: a seed, a second call under it, the next seed, a second call under that."""


def draw_count(elements: int) -> int:
    """Return the number of draws for a tensor of this size, a multiple of ``GROUP``."""
    fewest = MIN_SMALL_DRAWS if elements <= MAX_SMALL_ELEMENTS else MIN_DRAWS
    wanted = min(MAX_DRAWS, max(fewest, math.ceil(SAMPLED_ELEMENTS / max(1, elements))))
    return wanted - wanted % DRAWS_PER_GROUP


def sampled_positions(elements: int, draws: int) -> torch.Tensor:
    """Return the sampled positions of a draw: all, or spread-out runs that include both ends."""
    max_positions, run = max(64, SAMPLED_ELEMENTS // draws), 32
    if elements <= max_positions:
        return torch.arange(elements)
    starts = torch.linspace(0, elements - run, max_positions // run).long()
    return (starts[:, None] + torch.arange(run)).reshape(-1).unique()


def identical(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
    """Whether a draw equals ATen's, bit for bit."""
    return kernel.shape == aten.shape and same_bytes(kernel, aten.detach().cpu().resolve_conj().resolve_neg())


@dataclass(frozen=True, slots=True)
class Sample:
    """Draws of one result: a row for each draw, a column for each sampled element."""

    kernel: torch.Tensor
    aten: torch.Tensor
    pilot: torch.Tensor
    positions: torch.Tensor
    """The flat position of each column in the result."""
    row_length: int
    """Length of the result's last dimension: elements this far apart are neighbours too."""
    kernel_means: torch.Tensor
    """The mean of each whole draw."""
    aten_means: torch.Tensor

    @property
    def rounding_step(self) -> float:
        """The rounding step of the dtype; 0 for integers."""
        return float(torch.finfo(self.kernel.dtype).eps) if self.kernel.is_floating_point() else 0.0


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Sums of differences, the spread that they are judged by, and a message for each."""

    excess: torch.Tensor
    """Part of each sum that rounding does not explain."""
    spread: torch.Tensor
    """The root of the sum of squared differences."""
    describe: Callable[[int], str]
    """Describes what is wrong, for the test with this index."""

    @property
    def z(self) -> torch.Tensor:
        return torch.where(self.excess > 0, self.excess / self.spread.clamp(min=1e-300), 0.0)


def paired_test(
    kernel: torch.Tensor, aten: torch.Tensor, describe: Callable[[int], str], slack: float = 0.0
) -> PairedTest:
    """Return a test of measurements, a row per draw; ``slack`` is the mean rounding difference."""
    kernel, aten = kernel.reshape(len(kernel), -1), aten.reshape(len(aten), -1)
    differences = kernel - aten
    excess = differences.sum(0).abs() - slack * len(differences)
    return PairedTest(excess.clamp(min=0), differences.square().sum(0).sqrt(), describe)


@dataclass(frozen=True, slots=True)
class JointTestResult:
    """Result of all tests together."""

    reason: str | None
    """What is wrong; None when nothing is."""
    figures: dict[str, Any]


def judge_jointly(tests: Iterable[PairedTest], false_alarm_rate: float = FALSE_ALARM_RATE) -> JointTestResult:
    """Judge all tests together: an honest kernel fails at a rate of at most ``false_alarm``."""
    tests = [test for test in tests if test.excess.numel()]
    count = sum(test.excess.numel() for test in tests)
    if not count:
        return JointTestResult(None, {})
    limit = math.sqrt(2 * math.log(2 * count / false_alarm_rate))
    largest = max(float(test.z.max()) for test in tests)
    figures = {"tests": count, "z": round(largest, 3), "z_limit": round(limit, 3), "false_alarm": false_alarm_rate}
    failed = next((test for test in tests if float(test.z.max()) > limit), None)
    if failed is None:
        return JointTestResult(None, figures)
    message = failed.describe(int(failed.z.argmax()))
    return JointTestResult(f"{message} (z = {float(failed.z.max()):.1f}, allowed {limit:.1f})", figures)
