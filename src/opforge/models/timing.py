"""Times of a whole model with and without kernels, measured alternately, and each kernel's share."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Iterable
from typing import Any

from opforge.judge.timing.measurement import Measurement, Wait
from opforge.judge.verdict import VerdictKind
from opforge.models.model_process import ModelProcess, ModelProcessError
from opforge.procs import linux

_BUDGET_S = 4.0
_TARGET_BLOCK_NS = 20_000_000
_MAX_CALLS_PER_BLOCK = 100
_PROFILED_RUNS = 5
_MAX_WAIT_SHARE = 0.03
"""Share of a block that a side may wait for a core; beyond it, the round is set aside."""


def measure_speedup(with_kernels: ModelProcess, aten: ModelProcess) -> dict[str, Any]:
    """Return the times of a run on both sides, and their ratio with its 95 % interval."""
    cores = os.sched_getaffinity(0)
    chance = random.SystemRandom()
    core = {chance.choice(sorted(cores - {linux.current_core()}) or sorted(cores))}
    sides = [with_kernels, aten]
    try:
        for side in sides:
            side.worker.pin_to_cores(core)
        slowest_ns = max(_ns_per_run(side, 1) for side in sides)
        measurement = Measurement("call", max(1, min(_MAX_CALLS_PER_BLOCK, int(_TARGET_BLOCK_NS / slowest_ns))))
        deadline = time.monotonic() + _BUDGET_S
        while not measurement.done:
            measurement.done = measurement.next_round_is_last(out_of_time=time.monotonic() > deadline)
            if measurement.rounds % 2 == 0:
                chance.shuffle(sides)
            else:
                sides.reverse()
            measurement.waits.append(Wait.NONE)
            for side in sides:
                other = aten if side is with_kernels else with_kernels
                other.worker.pause()
                side.worker.resume()
                _time_block(measurement, side, is_kernel=side is with_kernels)
    finally:
        for side in sides:
            side.worker.pin_to_cores(cores)
            side.worker.resume()
    measurement.check_clocks()
    return measurement.row()


def _time_block(measurement: Measurement, side: ModelProcess, *, is_kernel: bool) -> None:
    waited_ns = side.worker.waited_ns()
    began = time.perf_counter_ns()
    reported_ns = _ns_per_run(side, measurement.calls)
    elapsed_ns = time.perf_counter_ns() - began
    waited_ns = side.worker.waited_ns() - waited_ns
    if waited_ns > _MAX_WAIT_SHARE * elapsed_ns:
        measurement.waits[-1] = Wait.INCLUDED
    (measurement.kernel_ns if is_kernel else measurement.aten_ns).append(reported_ns)
    (measurement.kernel_overhead_ns if is_kernel else measurement.aten_overhead_ns).append(
        elapsed_ns - reported_ns * (measurement.calls + 1)
    )


def _ns_per_run(side: ModelProcess, calls: int) -> float:
    reported_ns = side.ask({"do": "time", "calls": calls}).get("ns")
    if not isinstance(reported_ns, int | float) or not math.isfinite(reported_ns) or reported_ns <= 0:
        raise ModelProcessError(VerdictKind.CHEATED, f"says that a run of the model took {reported_ns!r} ns")
    return float(reported_ns)


def profile_kernels(
    with_kernels: ModelProcess, aten: ModelProcess, served: Iterable[tuple[str, str]]
) -> dict[str, dict[str, float | list[float]]]:
    """Return the time of each kernel's calls in a run, and ATen's time for the same calls.

    Gives medians, minima and maxima.
    """
    rows: dict[str, dict[str, float | list[float]]] = {}
    originals = [list(pair) for pair in served]
    for label, side, replaced in (("kernel", with_kernels, None), ("aten", aten, originals)):
        reply = side.ask({"do": "profile", "runs": _PROFILED_RUNS, "originals": replaced}).get("profile")
        for name, times in _parse_times(reply).items():
            rows.setdefault(name, {})[f"{label}_us"] = statistics.median(times) / 1000
            rows[name][f"{label}_us_range"] = [min(times) / 1000, max(times) / 1000]
    return rows


def _parse_times(reply: Any) -> dict[str, list[float]]:
    """Return the times of runs by kernel; invalid values are dropped: the process is untrusted."""
    times: dict[str, list[float]] = {}
    for run in reply if isinstance(reply, list) else []:
        for name, ns in run.items() if isinstance(run, dict) else []:
            if isinstance(ns, int | float) and math.isfinite(ns) and ns >= 0:
                times.setdefault(str(name), []).append(float(ns))
    return times
