"""Peaks of a device: bandwidth by working set, rates of arithmetic, the smallest launch and call.

Measured in a process of their own, which runs no kernel, and kept in the cache. Needs no torch.
"""

from __future__ import annotations

import json
import math
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from opforge import cache
from opforge.errors import InternalError
from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.runtime.devices import device_name
from opforge.sandbox.host.client import Spawner

_FORMAT = 3
_BUSY_PEAKS_LIFETIME_S = 3600.0
"""Peaks measured on a busy machine are measured again after this time."""
_MEASURE_TIMEOUT_S = 120.0

_SUBSTITUTE_KINDS: dict[ArithmeticKind, tuple[ArithmeticKind, ...]] = {
    ArithmeticKind.F64: (ArithmeticKind.F64_MATMUL,),
    ArithmeticKind.F32: (ArithmeticKind.F32_MATMUL,),
    ArithmeticKind.INTEGER: (ArithmeticKind.F32, ArithmeticKind.F32_MATMUL),
    ArithmeticKind.TF32_MATMUL: (ArithmeticKind.F32_MATMUL,),
    ArithmeticKind.F16_MATMUL: (ArithmeticKind.BF16_MATMUL,),
    ArithmeticKind.BF16_MATMUL: (ArithmeticKind.F16_MATMUL,),
}
"""Kinds whose rate is used for arithmetic that was not measured.

A product without special units runs at the plain rate, and integers have as many lanes as f32.
Arithmetic without a measured neighbour sets no bound.
"""

_PARTS_OF_F32 = {ArithmeticKind.TF32_MATMUL: 3, ArithmeticKind.BF16_MATMUL: 6}
"""Number of products of each kind that make one in f32: factors are split into parts with fewer bits.

ATen's own attention in f32 does so on a GPU, with three of tf32.
"""

BandwidthCurve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peaks of a device."""

    device: str
    """Its name, as given by the manufacturer."""
    device_type: str
    """``cpu`` or ``cuda``."""
    bandwidth_curve: BandwidthCurve
    """Bytes of the working set and bytes per second, ascending; each byte is touched once."""
    in_place_curve: BandwidthCurve
    """The same for memory that is read and written back.

    Each byte counts twice; that may cost less than touching two bytes.
    """
    rates: Mapping[ArithmeticKind, float]
    """Operations per second."""
    launch_us: float | None
    """Device time of the smallest kernel; None on a CPU."""
    call_us: float
    """Time of the smallest call of an ATen operator from Python, made as in a race."""
    measured_while_busy: bool = False
    """Whether the machine had other work meanwhile.

    Then the peaks are measured again an hour later, and the better ones kept.
    """

    def bandwidth(self, footprint_bytes: int, *, in_place: bool = False) -> float:
        """Return bytes per second for a working set.

        This is an upper bound: between two sizes, it is the faster rate.
        """
        once = _bandwidth_at(self.bandwidth_curve, footprint_bytes)
        return max(once, _bandwidth_at(self.in_place_curve, footprint_bytes)) if in_place else once

    def rate(self, kind: ArithmeticKind) -> float | None:
        """Return operations per second of a kind of arithmetic; None if unknown.

        A product in f32 may be made of several products with fewer bits, without loss.
        """
        rate = next((self.rates[k] for k in (kind, *_SUBSTITUTE_KINDS.get(kind, ())) if k in self.rates), None)
        if kind not in (ArithmeticKind.F32_MATMUL, ArithmeticKind.TF32_MATMUL):
            return rate
        built = (self.rates[part] / count for part, count in _PARTS_OF_F32.items() if part in self.rates)
        return max((r for r in (rate, *built) if r is not None), default=None)

    @property
    def fastest_rate(self) -> float | None:
        """Operations per second of the fastest arithmetic, from which any other can be built."""
        return max(self.rates.values(), default=None)

    def merge_best(self, earlier: Peaks) -> Peaks:
        """Return the better of each peak and an earlier one: disturbances only slow it down."""
        launches = [us for us in (self.launch_us, earlier.launch_us) if us is not None]
        return replace(
            self,
            bandwidth_curve=_better(self.bandwidth_curve, earlier.bandwidth_curve),
            in_place_curve=_better(self.in_place_curve, earlier.in_place_curve),
            rates={**earlier.rates, **{k: max(v, earlier.rates.get(k, 0.0)) for k, v in self.rates.items()}},
            launch_us=min(launches, default=None),
            call_us=min(self.call_us, earlier.call_us),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "kind": self.device_type,
            "bandwidth": [list(point) for point in self.bandwidth_curve],
            "bandwidth_in_place": [list(point) for point in self.in_place_curve],
            "rates": {kind.value: rate for kind, rate in self.rates.items()},
            "launch_us": self.launch_us,
            "call_us": self.call_us,
            "busy": self.measured_while_busy,
        }

    @classmethod
    def from_json(cls, row: Any) -> Peaks:
        """Return peaks from their JSON; raises ValueError if it is damaged."""
        try:
            curve, in_place = (
                tuple((int(size), float(rate)) for size, rate in row[name])
                for name in ("bandwidth", "bandwidth_in_place")
            )
            rates = {ArithmeticKind(kind): float(rate) for kind, rate in row["rates"].items()}
            launch = None if row["launch_us"] is None else float(row["launch_us"])
            call, busy = float(row["call_us"]), bool(row["busy"])
            peaks = cls(str(row["device"]), str(row["kind"]), curve, in_place, rates, launch, call, busy)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the peaks of a device: {error!r}") from error
        numbers = [*(rate for _, rate in (*curve, *in_place)), *rates.values(), peaks.call_us]
        ordered = all(sorted(points) == list(points) and points for points in (curve, in_place))
        if not ordered or not all(0 < n < math.inf for n in numbers) or peaks.device_type not in ("cpu", "cuda"):
            raise ValueError(f"not the peaks of a device: {json.dumps(row)[:200]}")
        return peaks


def _better(curve: BandwidthCurve, other: BandwidthCurve) -> BandwidthCurve:
    rates = dict(curve)
    return tuple(sorted({**rates, **{size: max(rate, rates.get(size, 0.0)) for size, rate in other}}.items()))


def _bandwidth_at(curve: BandwidthCurve, footprint_bytes: int) -> float:
    """Return the fastest rate at or above the largest size within a footprint: caches only help."""
    below = [index for index, (size, _) in enumerate(curve) if size <= footprint_bytes]
    return max(rate for _, rate in curve[below[-1] if below else 0 :])


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Send the device's name; then, if asked, measure the device."""
    from opforge.judge.roofline import measure_peaks

    channel = Channel.from_fd(fds[0])
    channel.send({"name": device_name(config["device"])})
    channel.receive()
    channel.send(measure_peaks.measure(config["device"]).as_json())


def load_or_measure(spawner: Spawner, device: str, *, remeasure: bool = False) -> Peaks:
    """Return a device's peaks from the cache, or measure them now, in a few seconds.

    ``remeasure`` measures in any case.
    """
    ours, theirs = Channel.pair()
    pid = spawner.spawn("peaks", {"device": device}, [theirs.fileno()], limits={}, output=False)
    theirs.close()
    try:
        path = cache_path(str(ours.receive(_MEASURE_TIMEOUT_S)["name"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            cached = None if remeasure else _read_cached(path)
            if cached is not None and (
                not cached.measured_while_busy or time.time() - path.stat().st_mtime < _BUSY_PEAKS_LIFETIME_S
            ):
                return cached
            ours.send({"measure": True})
            peaks = Peaks.from_json(ours.receive(_MEASURE_TIMEOUT_S))
            peaks = peaks if cached is None else peaks.merge_best(cached)
            cache.write_atomically(path, json.dumps(peaks.as_json(), indent=1))
            return peaks
    except (ChannelClosedError, TimeoutError) as error:
        raise InternalError(f"the peaks of device {device!r} could not be measured: {error}") from error
    finally:
        ours.close()
        spawner.stop(pid)


def cache_path(name: str) -> Path:
    """Return the file that keeps the peaks of a device of this machine."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", f"{name} {platform.node()}").strip("-")
    return cache.root() / "peaks" / f"{cache.torch_version()}-{_FORMAT}" / f"{stem}.json"


def _read_cached(path: Path) -> Peaks | None:
    """Return peaks from the cache; None if there are none or the file is damaged."""
    try:
        return Peaks.from_json(cache.read_json(path))
    except ValueError:
        return None
