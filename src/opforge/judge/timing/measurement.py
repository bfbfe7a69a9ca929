"""Evaluate the rounds of a race.

Computes ratios and their interval, whether more rounds are needed, and whether the clocks agree.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.verdict import RejectedError, VerdictKind
from opforge.sandbox.guest.timed_calls import short_pass_calls
from opforge.sandbox.host.request import RunRequest

_MIN_ROUNDS = 8
_MIN_COUNTED_LAYOUTS = 6
"""Minimum sample size for a 95 % interval of the median from order statistics."""
_MIN_SECONDARY_ROUNDS = 5
_MIN_DOUBTFUL_ROUNDS = 32
"""Rounds needed to accuse a kernel; it then is, if fewer than `_MIN_COUNTED_LAYOUTS` are honest."""
_MAX_INTERVAL_WIDTH = {"device": 0.015, "call": 0.02, "sync": 0.02}
"""Width of the interval, as a share of the ratio, at which a race may end."""
_PLACEMENT_ERROR = 0.002
"""Relative error from memory placement, added to every interval."""
_DEVICE_TIME_ERROR_NS = 5.0
"""Systematic error of a device time of a few µs in a race; also added to the interval."""
_CLOCK_SLACK_NS = 60_000
_CLOCK_SLACK_SHARE = 0.1
FILL_SLACK_NS = 400_000
"""Extra time that filling inputs may take on a GPU that nothing else keeps busy."""
_CLOCK_SURE_Z = 3.3
"""Confidence needed to say that a block took longer than reported: one error in a thousand."""


class Wait(enum.IntEnum):
    """Whether a process waited for a core or a GPU in a round."""

    NONE = 0
    EXCLUDED = 1
    """The wait is known, and excluded from the time."""
    INCLUDED = 2
    """The wait is part of the time."""


@dataclass
class Measurement:
    """Times of a call on both sides, round by round."""

    name: str
    calls: int
    gpu_sleep_ns: float = 0.0
    method: str = ""
    secondary: bool = False
    """Whether it only supplements another measurement: its interval may stay wide."""
    relayout_every: int = 1
    """Rounds between reallocations; the rounds on one allocation count as one."""
    kernel_ns: list[float] = field(default_factory=list)
    aten_ns: list[float] = field(default_factory=list)
    kernel_overhead_ns: list[float] = field(default_factory=list)
    aten_overhead_ns: list[float] = field(default_factory=list)
    """Time of each block by the judge's clock beyond the time that the worker reports.

    Empty where the judge's clock gives the time."""
    kernel_fill_ns: list[float] = field(default_factory=list)
    aten_fill_ns: list[float] = field(default_factory=list)
    """Time the judge took to fill the inputs on a GPU, while nothing of the worker ran."""
    waits: list[Wait] = field(default_factory=list)
    """Whether a side had to wait for a core in the round, or the judge for the GPU."""
    done: bool = False
    has_judged_result: bool = False
    """Whether a result of its calls was judged."""
    warmup_calls: int = 0
    """Untimed calls before the timed ones."""

    @property
    def rounds(self) -> int:
        return len(self.aten_ns)

    @property
    def block_calls(self) -> int:
        """Return the number of calls in a block, timed or not."""
        if self.name != "device":
            return self.calls + self.warmup_calls
        return self.calls + (short_pass_calls(self.calls) if self.method == "graph" else 0)

    @property
    def block_request(self) -> RunRequest:
        """Return the request to a worker for one block."""
        return RunRequest(self.name, self.calls, self.gpu_sleep_ns)

    @property
    def counted_rounds(self) -> list[int]:
        """Return the rounds that count.

        These are rounds without waits if there are enough, else rounds whose times exclude waits if
        there are enough, else all.
        """
        for max_wait in (Wait.NONE, Wait.EXCLUDED):
            if self._are_enough(rounds := self._rounds_with(max_wait)):
                return rounds
        return list(range(self.rounds))

    @property
    def needs_more_rounds(self) -> bool:
        """Whether too few rounds yet have times without waits."""
        return not self._are_enough(self._rounds_with(Wait.EXCLUDED))

    def _rounds_with(self, max_wait: Wait) -> list[int]:
        return [i for i, waited in enumerate(self.waits[: self.rounds]) if waited <= max_wait]

    def _are_enough(self, rounds: list[int]) -> bool:
        return len({i // self.relayout_every for i in rounds}) >= _MIN_COUNTED_LAYOUTS

    @property
    def ratios(self) -> list[float]:
        """Return ATen's time over the kernel's, the median of each allocation, sorted."""
        legs: dict[int, list[float]] = {}
        aten, kernel = self._corrected_ns(is_kernel=False), self._corrected_ns(is_kernel=True)
        for i in self.counted_rounds:
            legs.setdefault(i // self.relayout_every, []).append(aten[i] / kernel[i])
        return sorted(statistics.median(rounds) for rounds in legs.values())

    def median_ns(self, times: list[float]) -> float:
        """Return the median of one side's times in the rounds that count.

        A kernel can cause other rounds, and report any time for them.
        """
        return statistics.median(times[i] for i in self.counted_rounds)

    def _corrected_ns(self, *, is_kernel: bool) -> list[float]:
        """Return one side's times, plus unreported time that the judge's clock surely saw."""
        reported = self.kernel_ns if is_kernel else self.aten_ns
        unreported = self._unreported_ns
        if not unreported:
            return reported
        low, high = median_interval(sorted(unreported[i] for i in self.counted_rounds))
        extra = max(0.0, (low if is_kernel else -high) - self._clock_slack(self.median_ns(reported)))
        return [ns + extra / self.block_calls for ns in reported]

    @property
    def speedup(self) -> float:
        """Return the ratio, or the low end of its interval where the clocks seem to differ."""
        ratios = self.ratios
        return median_interval(ratios)[0] if self._clocks_differ else statistics.median(ratios)

    def _clock_slack(self, call_ns: float) -> float:
        """Return the allowed difference of the clocks on a block of calls of this duration."""
        return max(_CLOCK_SLACK_NS, _CLOCK_SLACK_SHARE * call_ns * self.block_calls)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = median_interval(self.ratios)
        shortest = min(statistics.median(self.kernel_ns), statistics.median(self.aten_ns))
        error = _PLACEMENT_ERROR + (_DEVICE_TIME_ERROR_NS / shortest if self.name == "device" else 0.0)
        return low / (1 + error), high * (1 + error)  # above zero even if no time passed

    @property
    def is_precise(self) -> bool:
        low, high = median_interval(self.ratios)
        return high - low <= _MAX_INTERVAL_WIDTH[self.name] * statistics.median(self.ratios)

    def next_round_is_last(self, *, out_of_time: bool) -> bool:
        """Whether the next round is the last."""
        min_rounds = (
            _MIN_SECONDARY_ROUNDS if self.secondary else max(_MIN_ROUNDS, _MIN_COUNTED_LAYOUTS * self.relayout_every)
        )
        if self.rounds + 1 < min_rounds:
            return False
        if self._is_doubtful and self.rounds + 1 < _MIN_DOUBTFUL_ROUNDS:
            return False  # even when out of time: a few rounds are not enough to accuse
        return out_of_time or ((self.secondary or self.is_precise) and not self._is_doubtful)

    def row(self) -> dict[str, Any]:
        quiet = self.counted_rounds
        aten, kernel = (self.median_ns(self._corrected_ns(is_kernel=is_kernel)) for is_kernel in (False, True))
        low, high = self.interval
        return {
            "kernel_us": (aten / self.speedup if self._clocks_differ else kernel) / 1000,
            "aten_us": aten / 1000,
            "speedup": self.speedup,
            "low": low,
            "high": high,
            "rounds": len(quiet),
            "set_aside": self.rounds - len(quiet),
            "calls": self.calls,
        }

    @property
    def _unreported_ns(self) -> list[float]:
        """Return how much longer the kernel's blocks were than reported.

        The overhead of a block is the same on both sides, so ATen's is subtracted.
        """
        return [k - a for k, a in zip(self.kernel_overhead_ns, self.aten_overhead_ns, strict=True)]

    @property
    def _extra_fill_ns(self) -> tuple[list[float], list[float]]:
        """Return the extra time to fill the kernel's inputs over ATen's, and the reverse."""
        longer = [k - a for k, a in zip(self.kernel_fill_ns, self.aten_fill_ns, strict=True)]
        return longer, [-ns for ns in longer]

    @property
    def _reported_kernel_ns(self) -> float:
        return self.median_ns(self.kernel_ns)

    @property
    def _clocks_differ(self) -> bool:
        """Whether the judge's clock contradicts the kernel's times in most rounds that count."""
        unreported = self._unreported_ns
        return bool(unreported) and statistics.median(unreported[i] for i in self.counted_rounds) > self._clock_slack(
            self._reported_kernel_ns
        )

    @property
    def _is_gpu_shared(self) -> bool:
        """Whether the judge's clock contradicts ATen's times too.

        Then something else uses the GPU, and the clock does not prove cheating.
        """
        slack = self._clock_slack(self.median_ns(self.aten_ns))
        return bool(self.aten_overhead_ns) and statistics.median(self.aten_overhead_ns) < -slack

    @property
    def _is_doubtful(self) -> bool:
        """Whether more rounds must show that the clocks agree and nothing keeps the GPU busy."""
        return self._clocks_differ or any(f and statistics.median(f) > FILL_SLACK_NS for f in self._extra_fill_ns)

    def check_clocks(self) -> None:
        """Reject times that the judge's clock contradicts, and GPU work of a stopped kernel."""
        if any(longer and _sure_lower_bound(longer) > FILL_SLACK_NS for longer in self._extra_fill_ns):
            raise RejectedError(
                VerdictKind.CHEATED, "keeps the GPU busy while its process is stopped, before timed calls begin"
            )
        unreported = _sure_lower_bound(self._unreported_ns)
        if unreported > self._clock_slack(self._reported_kernel_ns) and not self._is_gpu_shared:
            reported = self._reported_kernel_ns * self.block_calls
            raise RejectedError(
                VerdictKind.CHEATED,
                f"says that {self.block_calls} calls took {reported / 1e6:.3g} ms; by the judge's clock it was at "
                f"least {(reported + unreported) / 1e6:.3g} ms",
            )


def _sure_lower_bound(sample: list[float]) -> float:
    """Return a sure lower bound for the median of a sample."""
    return median_interval(sorted(sample), _CLOCK_SURE_Z)[0]


def median_interval(sorted_sample: list[float], confidence_z: float = 1.96) -> tuple[float, float]:
    """Return an interval for the median of a sorted sample, at 95 % by default.

    Its ends are order statistics, equally far from either end of the sample.
    """
    last = len(sorted_sample) - 1
    rank = max(0, math.floor((last - confidence_z * math.sqrt(len(sorted_sample))) / 2))
    return sorted_sample[rank], sorted_sample[last - rank]
