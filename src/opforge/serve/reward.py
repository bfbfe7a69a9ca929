"""Rewards for kernels, for training: what a client chooses with ``reward``.

A kernel that is not right in all of its cases has the reward 0, whatever it claims. A speed counts
by the low end of its interval, in steps, so that noise hardly moves a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from opforge.runs.rows import ResultRow

SPEED_STEPS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Speedups over ATen; the reward ``speed`` grows by 1 at each."""


def correct(rows: Iterable[ResultRow]) -> float:
    """Return 1: the kernel is right."""
    del rows
    return 1.0


def speed(rows: Iterable[ResultRow]) -> float:
    """Return 1, and 1 more for each step that the slowest timed case surely reaches."""
    lows = [low for row in rows if (low := _sure_speedup(row.figures)) is not None]
    return 1.0 + sum(min(lows) >= step for step in SPEED_STEPS) if lows else 1.0


REWARDS: dict[str, Callable[[Iterable[ResultRow]], float]] = {"correct": correct, "speed": speed}


def reward(name: str, rows: list[ResultRow], *, is_right: bool) -> float:
    """Return the reward of a kernel by a formula."""
    return REWARDS[name](rows) if is_right else 0.0


def _sure_speedup(figures: dict[str, Any]) -> float | None:
    return None if figures.get("launch_bound") or figures.get("alarm") else figures.get("speedup_low")
