"""The battery of tests on draws: it keeps its stated false-alarm rate, and has the power that it states."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from opforge.judge.random.distribution import (
    DRAWS_PER_GROUP,
    FALSE_ALARM_RATE,
    MAX_DRAWS,
    SAMPLED_ELEMENTS,
    Sample,
    draw_count,
    judge_jointly,
    sampled_positions,
)
from opforge.judge.random.tests import DrawTests


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: threads would only wait for one another
    yield
    torch.set_num_threads(before)


Draw = Callable[[int, int], torch.Tensor]


def judged(kernel: Draw, aten: Draw, draws: int, elements: int, false_alarm: float = FALSE_ALARM_RATE) -> str | None:
    at = torch.arange(elements)
    left, right, pilot = kernel(draws, elements), aten(draws, elements), aten(64, elements)
    totals = [side.double().mean(1) for side in (left, right)]
    sample = Sample(left, right, pilot, at, 4, totals[0], totals[1])
    return judge_jointly(DrawTests(sample, "result").tests(), false_alarm).reason


LEVELS = torch.linspace(0.05, 0.95, 12)
HONEST: list[tuple[str, Draw, Draw]] = [
    ("normal", torch.randn, torch.randn),
    ("bernoulli", lambda n, m: (torch.rand(n, m) < LEVELS[:m]).float(), lambda n, m: torch.bernoulli(LEVELS[:m].expand(n, m))),
    ("rare", lambda n, m: (torch.rand(n, m) < 0.004).float(), lambda n, m: (torch.rand(n, m) < 0.004).float()),
    ("cauchy", lambda n, m: torch.randn(n, m) / torch.randn(n, m), lambda n, m: torch.empty(n, m).cauchy_()),
    ("one for all", lambda n, m: torch.randn(n, 1).expand(n, m).contiguous(), lambda n, m: torch.randn(n, 1).expand(n, m).contiguous()),
    ("permutation", lambda n, m: torch.rand(n, m).argsort(1), lambda n, m: torch.rand(n, m).argsort(1)),
    ("half", lambda n, m: torch.rand(n, m).bfloat16(), lambda n, m: torch.rand(n, m, dtype=torch.bfloat16)),
    ("rounded otherwise", lambda n, m: (torch.rand(n, m) < 0.5) * (LEVELS[:m] * (1 + 1e-7)), lambda n, m: (torch.rand(n, m) < 0.5) * LEVELS[:m]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel", "aten"), HONEST, ids=[name for name, _, _ in HONEST])
def test_false_alarms_come_no_more_often_than_stated(name, kernel, aten):
    torch.manual_seed(7)
    repeats, stated = 250, 0.05  # 2,000 repeats over the eight kinds
    alarms = sum(judged(kernel, aten, 64, 4, stated) is not None for _ in range(repeats))
    # Four standard deviations above the stated rate: a battery that keeps it fails here once in thirty thousand.
    assert alarms <= stated * repeats + 4 * math.sqrt(repeats * stated * (1 - stated))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda n, m: torch.randn(n, m) * 1.05, "Kolmogorov-Smirnov"),
        (lambda n, m: torch.randn(n, m) + 0.03, "Kolmogorov-Smirnov"),
        (lambda n, m: torch.randn(n, m).clamp(-3, 3), "repeated values"),
        (
            lambda n, m: torch.randn(n, m) * 0.9 + torch.randn(n, m).abs() ** 3 / 60 * torch.randn(n, m),
            "Kolmogorov-Smirnov",
        ),
        (lambda n, m: torch.randn(n, 1) * 0.2 + torch.randn(n, m) * 0.96**0.5, "are correlated"),
        (lambda n, m: torch.randn(n, m).repeat_interleave(2, 0)[:n], "two calls in a row"),
        (lambda n, m: torch.randn(n // 4, 2, m).repeat(1, 2, 1).reshape(n, m), "a seed and the next one"),
        (lambda n, m: torch.randn(n // 5 + 1, m).repeat(5, 1)[:n], "different samples"),
        (lambda n, m: torch.randn(1, m).expand(n, m).contiguous(), "the same sample for every seed"),
        (lambda n, m: (torch.randn(n, m) * 64).round() / 64, "repeated values"),
    ],
)
def test_a_distribution_that_is_off_by_little_is_seen_in_enough_draws(kernel, words):
    torch.manual_seed(3)
    reason = judged(kernel, torch.randn, 1000, 200)
    assert reason is not None
    assert words in reason


def test_one_probability_a_tenth_too_small_is_seen():
    torch.manual_seed(5)
    elements = 100
    p = torch.rand(elements)
    reason = judged(
        lambda n, m: (torch.rand(n, m) < 0.9 * p).float(), lambda n, m: (torch.rand(n, m) < p).float(), 2000, elements
    )
    assert reason is not None
    assert "Kolmogorov-Smirnov distance" in reason


@pytest.mark.parametrize("elements", [1, 3, 100, 5000, 8192, 8193, 1_000_000])
def test_draws_and_positions_come_to_enough(elements):
    draws = draw_count(elements)
    at = sampled_positions(elements, draws)
    assert draws % DRAWS_PER_GROUP == 0
    assert draws <= MAX_DRAWS
    assert len(at) * draws >= min(0.9 * SAMPLED_ELEMENTS, MAX_DRAWS * elements)
    assert len(at) * draws <= 2 * SAMPLED_ELEMENTS or elements <= 2 * SAMPLED_ELEMENTS / draws
    assert (int(at[0]), int(at[-1])) == (0, elements - 1)


def test_nothing_drawn_is_nothing_to_test():
    assert judged(torch.randn, torch.randn, 8, 0) is None
