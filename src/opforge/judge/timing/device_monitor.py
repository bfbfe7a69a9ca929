"""State of a device during a race: clocks, power, heat and other load. Unknowns are left out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from opforge.judge.timing import nvml
from opforge.judge.timing.nvml import Gpu, GpuIdentity

_MAX_CLOCK_CHANGE = 0.03
"""Relative change of a clock during a race above which it is reported."""
_MAX_STOLEN_SHARE = 0.02
"""Share of time taken by other virtual machines above which it is reported."""
_MAX_SAMPLED_CORES = 16
"""Cores whose clock is read in each sample."""
_STOLEN_TIME_INDEX = 7
"""Index of stolen time in the first line of /proc/stat; later numbers are counted elsewhere."""


class _DeviceState(Protocol):
    def sample(self) -> None: ...
    def figures(self) -> dict[str, Any]: ...
    def notes(self) -> list[str]: ...


class DeviceMonitor:
    """Watches a device: call ``sample`` a few times in a race, then ``figures`` and ``notes``."""

    def __init__(
        self,
        device: str,
        *,
        library: ctypes.CDLL | None = None,
        identify: Callable[[str], GpuIdentity] | None = None,
        root: Path = Path("/"),
    ) -> None:
        """Watch ``cpu`` or ``cuda:N``; NVML and the root of /proc and /sys can be replaced."""
        self._states: list[_DeviceState] = [_CpuState(root)]
        if device.partition(":")[0] != "cpu":
            nvml_library = library or nvml.load_library()
            gpu = Gpu.find(nvml_library, (identify or gpu_identity)(device)) if nvml_library is not None else None
            self._states.insert(0, _GpuState(gpu))

    def sample(self) -> None:
        """Take one sample; cheap enough to do between the rounds of a race."""
        for state in self._states:
            state.sample()

    def figures(self) -> dict[str, Any]:
        """Return the field ``clocks`` of a line of results; empty where nothing is known."""
        return {name: value for state in self._states for name, value in state.figures().items() if value is not None}

    def notes(self) -> list[str]:
        """Return a sentence for each thing that may have distorted the times."""
        return [remark for state in self._states for remark in state.notes()]


def gpu_identity(device: str) -> GpuIdentity:
    """Return UUID and bus of a torch device: CUDA_VISIBLE_DEVICES may change its number."""
    import torch  # only needed for races on a GPU

    properties = torch.cuda.get_device_properties(torch.device(device))
    uuid = str(getattr(properties, "uuid", ""))
    bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return GpuIdentity(uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}", bus)


@dataclass
class _GpuState:
    gpu: Gpu | None
    busy_mhz: list[int] = field(default_factory=list)
    """SM clocks in MHz while the GPU was busy."""
    idle_mhz: list[int] = field(default_factory=list)
    """SM clocks in MHz while the GPU was idle."""
    watts: list[float] = field(default_factory=list)
    reason_bits: int = 0

    def sample(self) -> None:
        if self.gpu is None:
            return
        bits = self.gpu.clock_limit_bits() or 0
        self.reason_bits |= bits
        if (mhz := self.gpu.sm_mhz()) is not None:
            (self.idle_mhz if bits & nvml.IDLE_BIT else self.busy_mhz).append(mhz)
        if (watts := self.gpu.power_w()) is not None:
            self.watts.append(watts)

    def figures(self) -> dict[str, Any]:
        if self.gpu is None:
            return {}
        mhz = self.busy_mhz or self.idle_mhz
        state = self.gpu.performance_state()
        return {
            "sm_mhz_low": min(mhz, default=None),
            "sm_mhz_high": max(mhz, default=None),
            "sm_mhz_most": self.gpu.sm_max_mhz(),
            "memory_mhz": self.gpu.memory_mhz(),
            "power_w": max(self.watts, default=None),
            "power_limit_w": self.gpu.power_limit_w(),
            "temperature_c": self.gpu.temperature_c(),
            "performance_state": None if state is None else f"P{state}",
            "reasons": [word for bit, word in nvml.CLOCK_LIMIT_REASONS.items() if self.reason_bits & bit] or None,
        }

    def notes(self) -> list[str]:
        if self.gpu is None:
            return ["clocks and power of the GPU are unknown: NVML is missing or does not support the device"]
        remarks = []
        if reasons := [
            word for bit, word in nvml.CLOCK_LIMIT_REASONS.items() if self.reason_bits & nvml.THROTTLE_BITS & bit
        ]:
            remarks.append(f"the GPU was throttled during timing: {', '.join(reasons)}")
        return [*remarks, *_clock_change_notes("the GPU's clock", self.busy_mhz)]


class _CpuState:
    """State of the CPU: its clock where available, its load, and stolen time."""

    def __init__(self, root: Path) -> None:
        self._proc = root / "proc"
        self._cores = root / "sys/devices/system/cpu"
        self._frequencies = sorted(self._cores.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))[:_MAX_SAMPLED_CORES]
        self._mhz: list[float] = []
        self._loads: list[float] = []
        self._times: list[tuple[int, int]] = []

    def sample(self) -> None:
        if (mhz := self._fastest_core_mhz()) is not None:
            self._mhz.append(mhz)
        if loads := _parse_numbers(_text(self._proc / "loadavg").split()[:1]):
            self._loads.append(loads[0])
        lines = _text(self._proc / "stat").splitlines()
        if lines and len(ticks := _parse_numbers(lines[0].split()[1:])) > _STOLEN_TIME_INDEX:
            self._times.append((int(ticks[_STOLEN_TIME_INDEX]), int(sum(ticks[: _STOLEN_TIME_INDEX + 1]))))

    def figures(self) -> dict[str, Any]:
        mhz = self._mhz or _parse_numbers(
            re.findall(r"^cpu MHz\s*:\s*(\S+)", _text(self._proc / "cpuinfo"), re.MULTILINE)
        )
        return {
            "mhz_low": min(mhz, default=None),
            "mhz_high": max(mhz, default=None),
            "governor": _text(self._cores / "cpu0/cpufreq/scaling_governor").strip() or None,
            "load": max(self._loads, default=None),
            "stolen": self._stolen_share(),
        }

    def notes(self) -> list[str]:
        remarks = _clock_change_notes("the CPU's clock", self._mhz)
        cores = os.cpu_count() or 1
        if self._loads and max(self._loads) > cores:
            remarks.append(f"the machine was busy with other work: a load of {max(self._loads):g} on {cores} core(s)")
        if (stolen := self._stolen_share()) is not None and stolen > _MAX_STOLEN_SHARE:
            remarks.append(f"other virtual machines took {stolen:.0%} of the time during timing")
        return remarks

    def _fastest_core_mhz(self) -> float | None:
        """Return the clock of the fastest core: the one that is busy, as the others are idle."""
        kilohertz = _parse_numbers(_text(path) for path in self._frequencies)
        return max(kilohertz) / 1000 if kilohertz else None

    def _stolen_share(self) -> float | None:
        """Return the share of time stolen between the first sample and the last."""
        if len(self._times) < 2:
            return None
        (stolen, total), (later_stolen, later_total) = self._times[0], self._times[-1]
        return (later_stolen - stolen) / (later_total - total) if later_total > total else None


def _clock_change_notes(label: str, mhz: list[int] | list[float]) -> list[str]:
    if not mhz or max(mhz) - min(mhz) <= _MAX_CLOCK_CHANGE * max(mhz):
        return []
    return [f"{label} changed during timing: between {min(mhz):g} and {max(mhz):g} MHz"]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _parse_numbers(texts: Iterable[str]) -> list[float]:
    numbers = []
    for text in texts:
        with contextlib.suppress(ValueError):
            numbers.append(float(text))
    return numbers
