"""Speeds of timed cases and their geometric means, with intervals derived from their parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from opforge.runs.rows import ResultRow, TimeRecord


@dataclass(frozen=True, slots=True)
class Ratio:
    """ATen's time over the kernel's, with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, times: TimeRecord) -> Ratio:
        return cls(times.speedup, times.low, times.high)

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True, slots=True)
class CaseSpeed:
    """One timed case, read from a line of the results. Lines of older runs have only speedups."""

    speed: Ratio
    """The headline: device times on a GPU, call times on the CPU."""
    is_device_time: bool = False
    call_speed: Ratio | None = None
    """Ratio of call times, if the headline is device times."""
    sol_percent: float | None = None
    """Percent of the speed of light that the kernel reaches."""
    aten_sol_percent: float | None = None
    launch_bound: bool = False
    alarm: str = ""
    """Why the time is not credible; empty if it is."""
    events: bool = False
    """Whether device time comes from events around the calls, as graph capture was not possible."""
    case: str = ""
    """The call's text, for an alarmed case."""
    aten_us: float | None = None
    """ATen's time."""

    @property
    def is_scored(self) -> bool:
        """Whether the speed scores include it: no alarm and not launch-bound."""
        return not self.alarm and not self.launch_bound

    @classmethod
    def from_row(cls, row: ResultRow) -> CaseSpeed | None:
        """Return the times in a line; None if nothing was timed."""
        headline = row.headline
        if headline is None:
            return None
        of_device = row.timed == "device"
        device, call, sol = row.times("device"), row.times("call") if of_device else None, row.sol
        return cls(
            Ratio.of(headline),
            is_device_time=of_device,
            call_speed=None if call is None else Ratio.of(call),
            sol_percent=None if sol is None else sol.kernel,
            aten_sol_percent=None if sol is None else sol.aten,
            launch_bound=row.launch_bound,
            alarm=row.alarm,
            events=device is not None and device.method == "events",
            case=row.case if row.alarm else "",
            aten_us=headline.aten_us,
        )


def geomean(ratios: Iterable[Ratio]) -> Ratio | None:
    """Return the geometric mean with its 95 % interval; None for no ratios.

    On the logarithmic scale this is a plain mean of independent estimates. Each has its own
    interval, which need not be symmetric. So the distance from the mean to its low end is the root
    of the summed squares of the parts' distances to their low ends, over their number; likewise for
    the high end (Zou and Donner's recovery of variances from intervals). A mean of means equals the
    mean of all parts with their weights. The interval covers measurement error only: it says how
    well the mean over these cases is known, not how other cases would fare.
    """
    parts = [(math.log(r.value), math.log(r.low), math.log(r.high)) for r in ratios]
    if not parts:
        return None
    centre = sum(v for v, _, _ in parts) / len(parts)
    below = math.hypot(*(v - low for v, low, _ in parts)) / len(parts)
    above = math.hypot(*(high - v for v, _, high in parts)) / len(parts)
    return Ratio(math.exp(centre), math.exp(centre - below), math.exp(centre + above))


def divide(numerator: Ratio, denominator: Ratio) -> Ratio:
    """Return the ratio of two speeds with its 95 % interval.

    Both are independent measurements against the same baseline.
    """
    value = math.log(numerator.value) - math.log(denominator.value)
    below = math.hypot(math.log(numerator.value / numerator.low), math.log(denominator.high / denominator.value))
    above = math.hypot(math.log(numerator.high / numerator.value), math.log(denominator.value / denominator.low))
    return Ratio(math.exp(value), math.exp(value - below), math.exp(value + above))


@dataclass(frozen=True, slots=True)
class PerfAtP:
    """The share of raced operators that are correct and at least ``p`` times as fast as ATen."""

    p: float
    value: float
    low: float
    """The share whose interval lies at ``p`` or above."""
    high: float
    """The share whose interval reaches ``p``."""

    @classmethod
    def from_speeds(cls, p: float, speeds: Iterable[Ratio], total: int) -> PerfAtP:
        """Return the share among ``total`` operators; those without a speed are failures."""
        known = list(speeds)
        value = sum(1 for s in known if s.value >= p)
        low = sum(1 for s in known if s.low >= p)
        high = sum(1 for s in known if s.high >= p)
        return cls(p, value / total, low / total, high / total)

    def as_json(self) -> dict[str, float]:
        return {"p": self.p, "share": self.value, "low": self.low, "high": self.high}
