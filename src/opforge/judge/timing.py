"""Race a kernel against ATen: each in its own worker, short blocks in alternating order, a ratio with an interval.

Every timed call has contents of its own, results of timed calls are judged like any other, and what the kernel's
process says of its times must agree with the judge's own clock.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.judge.workers import DeathError, KernelWorker

_BLOCK_NS = 2_000_000
_MAX_CALLS = 64
_MAX_BLOCK_BYTES = 256 << 20
_BUDGET_S = 1.0
_MIN_ROUNDS = 12
_NARROW = 0.02
_HEARD = 3
"""Rounds, besides the last, in which a result is judged."""
_CLOCK_SLACK_NS = 300_000
_CLOCK_SURE_Z = 3.3
"""How sure the judge is that a block took longer than was said of it, before it says so: one in a thousand is wrong."""

Hear = Callable[[dict[str, Any], int], Finding]
"""Judges the result of a timed call whose contents were turned by so many places."""


class BaselineError(Exception):
    """ATen's own worker was lost while it was timed."""


@dataclass
class _Side:
    """One of the two that are raced."""

    worker: KernelWorker
    times_ns: list[float] = field(default_factory=list)
    beside_ns: list[float] = field(default_factory=list)
    """What the judge's clock saw of each block beyond the time that the worker says it took."""

    def block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one block and return the worker's reply."""
        began = time.perf_counter_ns()
        stopped = self.worker.ask(request, cases=len(request["turns"]))
        outside_ns = time.perf_counter_ns() - began
        reply = self.worker.answer()
        said = stopped.get("ns") if isinstance(stopped, dict) else None
        if not isinstance(reply, dict):
            raise NotRightError(Outcome.CONTRACT, "the worker's reply is not one that our harness writes")
        if not isinstance(said, int | float) or not math.isfinite(said) or said <= 0:
            raise NotRightError(Outcome.CHEATED, f"says that a timed call took {said!r} ns")
        self.times_ns.append(float(said))
        self.beside_ns.append(outside_ns - said * len(request["turns"]))
        return reply


class Race:
    """A race over one case."""

    def __init__(
        self, kernel: KernelWorker, baseline: KernelWorker, request: dict[str, Any], hear: Hear | None
    ) -> None:
        self._kernel, self._aten = _Side(kernel), _Side(baseline)
        self._request = {"do": "time", **request}
        self._hear = hear
        self._chance = random.SystemRandom()

    def run(self, nbytes: int) -> dict[str, Any]:
        """Return call times in µs, the speedup over ATen and its 95 % interval, with the number of rounds."""
        calls = self._calls(nbytes)
        sides = [self._kernel, self._aten]
        deadline = time.monotonic() + _BUDGET_S
        done = False
        while not done:
            done = len(self._ratios) + 1 >= _MIN_ROUNDS and (time.monotonic() > deadline or self._narrow())
            for side in sides:
                self._round(side, calls, heard=done or len(side.times_ns) < _HEARD)
            sides.reverse()
        self._clocks_agree(calls)
        ratios = self._ratios
        low, high = median_interval(ratios)
        return {
            "kernel_us": statistics.median(self._kernel.times_ns) / 1000,
            "aten_us": statistics.median(self._aten.times_ns) / 1000,
            "speedup": statistics.median(ratios),
            "speedup_low": low,
            "speedup_high": high,
            "rounds": len(ratios),
            "calls_per_round": calls,
        }

    @property
    def _ratios(self) -> list[float]:
        return sorted(a / k for a, k in zip(self._aten.times_ns, self._kernel.times_ns, strict=True))

    def _narrow(self) -> bool:
        low, high = median_interval(self._ratios)
        return high - low <= _NARROW * statistics.median(self._ratios)

    def _calls(self, nbytes: int) -> int:
        """Return how many calls make a block that is long enough to be timed, and forget the calls that this took."""
        for side in (self._kernel, self._aten) * 3:
            self._round(side, 1, heard=False)
        longest = max(*self._kernel.times_ns[1:], *self._aten.times_ns[1:])
        for side in (self._kernel, self._aten):
            side.times_ns.clear()
            side.beside_ns.clear()
        return max(1, min(_MAX_CALLS, int(_BLOCK_NS / longest), _MAX_BLOCK_BYTES // max(1, nbytes)))

    def _round(self, side: _Side, calls: int, *, heard: bool) -> None:
        turns = [self._chance.randrange(1, 1 << 30) for _ in range(calls)]
        show = calls - 1 if len(side.times_ns) % 2 == 0 else self._chance.randrange(calls)
        request = {**self._request, "turns": turns, "show": show}
        if side is self._aten:
            try:
                side.block(request)
            except DeathError as death:
                raise BaselineError(str(death)) from None
            return
        reply = side.block(request)
        if tampered := reply.get("tampered"):
            raise NotRightError(Outcome.CHEATED, f"tampered with its process: {'; '.join(map(str, tampered))}")
        if heard and self._hear is not None:
            finding = self._hear(reply.get("result") or {}, turns[show])
            if not finding.passed:
                raise NotRightError(Outcome.CHEATED, f"an output of a timed call is wrong: {finding.reason}")

    def _clocks_agree(self, calls: int) -> None:
        """Refuse times that the judge's clock contradicts: what a block takes beside the calls is the same on both sides."""
        unsaid = sorted(k - a for k, a in zip(self._kernel.beside_ns, self._aten.beside_ns, strict=True))
        said = statistics.median(self._kernel.times_ns) * calls
        surely, _ = median_interval(unsaid, _CLOCK_SURE_Z)
        if surely > max(_CLOCK_SLACK_NS, said / 2):
            raise NotRightError(
                Outcome.CHEATED,
                f"says that {calls} calls took {said / 1e6:.3g} ms; by the judge's clock it was at least {(said + surely) / 1e6:.3g} ms",
            )


def median_interval(ordered: list[float], confidence_z: float = 1.96) -> tuple[float, float]:
    """Return an interval for the median of a sorted sample from its order statistics, at 95 % by default."""
    count = len(ordered)
    reach = confidence_z * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]
