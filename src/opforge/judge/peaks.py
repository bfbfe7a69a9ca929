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
from opforge.judge.kinds import Kind
from opforge.runtime.devices import device_name
from opforge.sandbox.client import Spawner
from opforge.sandbox.wire import Channel, ChannelClosedError

_FORMAT = 2
_BUSY_PEAKS_LIFETIME_S = 3600.0
"""Peaks measured on a busy machine are measured again after this time."""
_LIMIT_S = 120.0

_SUBSTITUTE_KINDS: dict[Kind, tuple[Kind, ...]] = {
    Kind.F64: (Kind.F64_PRODUCT,),
    Kind.F32: (Kind.F32_PRODUCT,),
    Kind.INTEGER: (Kind.F32, Kind.F32_PRODUCT),
    Kind.TF32_PRODUCT: (Kind.F32_PRODUCT,),
    Kind.F16_PRODUCT: (Kind.BF16_PRODUCT,),
    Kind.BF16_PRODUCT: (Kind.F16_PRODUCT,),
}
"""Kinds whose rate is used for arithmetic that was not measured.

A product without special units runs at the plain rate, and integers have as many lanes as f32.
Arithmetic without a measured neighbour sets no bound.
"""

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peaks of a device."""

    device: str
    """Its name, as given by the manufacturer."""
    kind: str
    """``cpu`` or ``cuda``."""
    curve: Curve
    """Bytes of the working set and bytes per second, ascending; each byte is touched once."""
    in_place_curve: Curve
    """The same for memory that is read and written back.

    Each byte counts twice; that may cost less than touching two bytes.
    """
    rates: Mapping[Kind, float]
    """Operations per second."""
    launch_us: float | None
    """Device time of the smallest kernel; None on a CPU."""
    call_us: float
    """Time of the smallest call of an ATen operator from Python, made as in a race."""
    busy: bool = False
    """Whether the machine had other work meanwhile.

    Then the peaks are measured again an hour later, and the better ones kept.
    """

    def bandwidth(self, footprint_bytes: int, *, in_place: bool = False) -> float:
        """Return bytes per second for a working set.

        This is an upper bound: between two sizes, it is the faster rate.
        """
        once = _at(self.curve, footprint_bytes)
        return max(once, _at(self.in_place_curve, footprint_bytes)) if in_place else once

    def rate(self, kind: Kind) -> float | None:
        """Return operations per second of a kind of arithmetic; None if unknown."""
        return next((self.rates[k] for k in (kind, *_SUBSTITUTE_KINDS.get(kind, ())) if k in self.rates), None)

    @property
    def fastest(self) -> float | None:
        """Operations per second of the fastest arithmetic, from which any other can be built."""
        return max(self.rates.values(), default=None)

    def with_better(self, earlier: Peaks) -> Peaks:
        """Return the better of each peak and an earlier one: disturbances only slow it down."""
        launches = [us for us in (self.launch_us, earlier.launch_us) if us is not None]
        return replace(
            self,
            curve=_better(self.curve, earlier.curve),
            in_place_curve=_better(self.in_place_curve, earlier.in_place_curve),
            rates={**earlier.rates, **{k: max(v, earlier.rates.get(k, 0.0)) for k, v in self.rates.items()}},
            launch_us=min(launches, default=None),
            call_us=min(self.call_us, earlier.call_us),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "kind": self.kind,
            "bandwidth": [list(point) for point in self.curve],
            "bandwidth_in_place": [list(point) for point in self.in_place_curve],
            "rates": {kind.value: rate for kind, rate in self.rates.items()},
            "launch_us": self.launch_us,
            "call_us": self.call_us,
            "busy": self.busy,
        }

    @classmethod
    def from_json(cls, row: Any) -> Peaks:
        """Return peaks from their JSON; raises ValueError if it is damaged."""
        try:
            curve, in_place = (
                tuple((int(size), float(rate)) for size, rate in row[name])
                for name in ("bandwidth", "bandwidth_in_place")
            )
            rates = {Kind(kind): float(rate) for kind, rate in row["rates"].items()}
            launch = None if row["launch_us"] is None else float(row["launch_us"])
            call, busy = float(row["call_us"]), bool(row["busy"])
            peaks = cls(str(row["device"]), str(row["kind"]), curve, in_place, rates, launch, call, busy)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these are no peaks of a device: {error!r}") from error
        numbers = [*(rate for _, rate in (*curve, *in_place)), *rates.values(), peaks.call_us]
        ordered = all(sorted(points) == list(points) and points for points in (curve, in_place))
        if not ordered or not all(0 < n < math.inf for n in numbers) or peaks.kind not in ("cpu", "cuda"):
            raise ValueError(f"these are no peaks of a device: {json.dumps(row)[:200]}")
        return peaks


def _better(curve: Curve, other: Curve) -> Curve:
    rates = dict(curve)
    return tuple(sorted({**rates, **{size: max(rate, rates.get(size, 0.0)) for size, rate in other}}.items()))


def _at(curve: Curve, footprint_bytes: int) -> float:
    """Return the fastest rate at or above the largest size within a footprint: caches only help."""
    below = [index for index, (size, _) in enumerate(curve) if size <= footprint_bytes]
    return max(rate for _, rate in curve[below[-1] if below else 0 :])


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Send the device's name; then, if asked, measure the device."""
    from opforge.judge import measuring  # needs torch, which the asking process does not load

    channel = Channel.from_fd(fds[0])
    channel.send({"name": device_name(config["device"])})
    channel.receive()
    channel.send(measuring.measure(config["device"]).as_json())


def known_peaks(spawner: Spawner, device: str, *, anew: bool = False) -> Peaks:
    """Return a device's peaks from the cache, or measure them now, in a few seconds.

    ``anew`` measures in any case.
    """
    ours, theirs = Channel.pair()
    pid = spawner.spawn("peaks", {"device": device}, [theirs.fileno()], limits={}, output=False)
    theirs.close()
    try:
        path = path_of(str(ours.receive(_LIMIT_S)["name"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            cached = None if anew else _kept(path)
            if cached is not None and (not cached.busy or time.time() - path.stat().st_mtime < _BUSY_PEAKS_LIFETIME_S):
                return cached
            ours.send({"measure": True})
            peaks = Peaks.from_json(ours.receive(_LIMIT_S))
            peaks = peaks if cached is None else peaks.with_better(cached)
            cache.write_atomically(path, json.dumps(peaks.as_json(), indent=1))
            return peaks
    except (ChannelClosedError, TimeoutError) as error:
        raise InternalError(f"the peaks of device {device!r} could not be measured: {error}") from error
    finally:
        ours.close()
        spawner.stop(pid)


def path_of(name: str) -> Path:
    """Return the file that keeps the peaks of a device of this machine."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", f"{name} {platform.node()}").strip("-")
    return cache.root() / "peaks" / f"{cache.torch_version()}-{_FORMAT}" / f"{stem}.json"


def _kept(path: Path) -> Peaks | None:
    """Return peaks from the cache; None if there are none or the file is damaged."""
    try:
        return Peaks.from_json(cache.read_json(path))
    except ValueError:
        return None
