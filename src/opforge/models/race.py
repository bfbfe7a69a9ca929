"""Times of a whole model with and without kernels, measured in turns, and each kernel's share."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Iterable
from typing import Any

from opforge import processes
from opforge.judge.figures import Figure, Wait
from opforge.judge.verdict import Outcome
from opforge.models.process import ModelError, ModelProcess

_BUDGET_S = 4.0
_BLOCK_NS = 20_000_000
_MOST_CALLS = 100
_PROFILED = 5
_WAITED = 0.03
"""Share of a block that a side may wait for a core; beyond it, the round is set aside."""


def race(kernels: ModelProcess, plain: ModelProcess) -> dict[str, Any]:
    """Return the times of a run on both sides, and their ratio with its 95 % interval."""
    cores = os.sched_getaffinity(0)
    chance = random.SystemRandom()
    core = {chance.choice(sorted(cores - {processes.present_core()}) or sorted(cores))}
    sides = [kernels, plain]
    try:
        for side in sides:
            side.worker.stay_on(core)
        slowest = max(_ns(side, 1) for side in sides)
        figure = Figure("call", max(1, min(_MOST_CALLS, int(_BLOCK_NS / slowest))))
        deadline = time.monotonic() + _BUDGET_S
        while not figure.done:
            figure.done = figure.ends(out_of_time=time.monotonic() > deadline)
            if figure.rounds % 2 == 0:
                chance.shuffle(sides)
            else:
                sides.reverse()
            figure.waited.append(Wait.NONE)
            for side in sides:
                other = plain if side is kernels else kernels
                other.worker.pause()
                side.worker.resume()
                _block(figure, side, is_kernel=side is kernels)
    finally:
        for side in sides:
            side.worker.stay_on(cores)
            side.worker.resume()
    figure.clocks_agree()
    return figure.row()


def _block(figure: Figure, side: ModelProcess, *, is_kernel: bool) -> None:
    waited = side.worker.waited_ns()
    began = time.perf_counter_ns()
    said = _ns(side, figure.calls)
    outside = time.perf_counter_ns() - began
    waited = side.worker.waited_ns() - waited
    if waited > _WAITED * outside:
        figure.waited[-1] = Wait.COUNTED
    (figure.kernel_ns if is_kernel else figure.aten_ns).append(said)
    (figure.kernel_beside if is_kernel else figure.aten_beside).append(outside - said * (figure.calls + 1))


def _ns(side: ModelProcess, calls: int) -> float:
    said = side.ask({"do": "time", "calls": calls}).get("ns")
    if not isinstance(said, int | float) or not math.isfinite(said) or said <= 0:
        raise ModelError(Outcome.CHEATED, f"says that a run of the model took {said!r} ns")
    return float(said)


def profile(kernels: ModelProcess, plain: ModelProcess, served: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the time of each kernel's calls in a run, and ATen's time for the same calls.

    Gives medians, minima and maxima.
    """
    rows: dict[str, dict[str, Any]] = {}
    asked: dict[str, dict[str, Any]] = {
        "kernel": {},
        "aten": {"originals": [list(pair) for pair in served]},
    }
    for who, side in (("kernel", kernels), ("aten", plain)):
        found = side.ask({"do": "profile", "runs": _PROFILED, **asked[who]}).get("profile")
        for name, times in _times(found).items():
            rows.setdefault(name, {})[f"{who}_us"] = statistics.median(times) / 1000
            rows[name][f"{who}_us_range"] = [min(times) / 1000, max(times) / 1000]
    return rows


def _times(found: Any) -> dict[str, list[float]]:
    """Return the times of runs by kernel; invalid values are dropped: the process is untrusted."""
    times: dict[str, list[float]] = {}
    for run in found if isinstance(found, list) else []:
        for name, ns in run.items() if isinstance(run, dict) else []:
            if isinstance(ns, int | float) and math.isfinite(ns) and ns >= 0:
                times.setdefault(str(name), []).append(float(ns))
    return times
