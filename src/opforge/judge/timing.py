"""Race a kernel against ATen: each in its own worker, short blocks in alternating order, a ratio with an interval."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from opforge.judge.workers import DeathError, KernelWorker

_BLOCK_NS = 2_000_000
_MAX_CALLS = 64
_BUDGET_S = 1.0
_MIN_ROUNDS = 12
_NARROW = 0.02


class BaselineError(Exception):
    """ATen's own worker was lost while it was timed."""


class ForgedTimesError(Exception):
    """A worker's times are not what our code in the worker writes."""


def race(kernel: KernelWorker, baseline: KernelWorker, op: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return call times in µs, the speedup over ATen and its 95 % interval, with the number of rounds."""
    request: dict[str, Any] = {"do": "time", "op": op, "case": case, "blocks": 1, "calls": 1}
    first = max(max(_times(worker, {**request, "blocks": 3}, baseline)[1:]) for worker in (kernel, baseline))
    request["calls"] = max(1, min(_MAX_CALLS, int(_BLOCK_NS / max(first, 1.0))))
    times: dict[str, list[float]] = {"kernel": [], "aten": []}
    sides = [("kernel", kernel), ("aten", baseline)]
    deadline = time.monotonic() + _BUDGET_S
    while True:
        for name, worker in sides:
            times[name] += _times(worker, request, baseline)
        sides.reverse()
        ratios = sorted(a / k for a, k in zip(times["aten"], times["kernel"], strict=True))
        low, high = median_interval(ratios)
        enough = len(ratios) >= _MIN_ROUNDS and (high - low) <= _NARROW * statistics.median(ratios)
        if enough or (time.monotonic() > deadline and len(ratios) >= _MIN_ROUNDS):
            break
    return {
        "kernel_us": statistics.median(times["kernel"]) / 1000,
        "aten_us": statistics.median(times["aten"]) / 1000,
        "speedup": statistics.median(ratios),
        "speedup_low": low,
        "speedup_high": high,
        "rounds": len(ratios),
        "calls_per_round": request["calls"],
    }


def _times(worker: KernelWorker, request: dict[str, Any], baseline: KernelWorker) -> list[float]:
    """Return the readings of a worker in ns; they are an untrusted process's words, so their form is checked."""
    count = request["blocks"] * request["calls"]
    try:
        reply = worker.ask(request, cases=count)
    except DeathError as death:
        if worker is baseline:
            raise BaselineError(str(death)) from None
        raise
    readings = reply.get("ns") if isinstance(reply, dict) else None
    if not isinstance(readings, list) or len(readings) != request["blocks"]:
        raise ForgedTimesError
    if not all(isinstance(r, int | float) and math.isfinite(r) and r > 0 for r in readings):
        raise ForgedTimesError
    return [float(r) for r in readings]


def median_interval(ordered: list[float], confidence_z: float = 1.96) -> tuple[float, float]:
    """Return an interval for the median of a sorted sample from its order statistics, at 95 % by default."""
    count = len(ordered)
    reach = confidence_z * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]
