"""NVIDIA's management library through ctypes: the few queries that a race needs. Needs no torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY_NAME = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2
_GPU_SENSOR = 0

CLOCK_LIMIT_REASONS: dict[int, str] = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised with other GPUs",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Reasons for low clocks, by bit."""
THROTTLE_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
IDLE_BIT = 0x1


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """Identity of a GPU, independent of its number in a process."""

    uuid: str
    """With its prefix, as in ``GPU-1234…``."""
    pci_bus_id: str
    """Domain, bus and device, as in ``00000000:1a:00.0``."""


class Gpu:
    """One GPU; an answer is None if the library lacks the query or the GPU has no answer."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def find(cls, library: ctypes.CDLL, identity: GpuIdentity) -> Gpu | None:
        """Return the GPU with this identity; None if the library does not start or know it."""
        if _call(library, "nvmlInit_v2") != 0:
            return None
        handle = ctypes.c_void_p()
        for function_name, name in (
            ("nvmlDeviceGetHandleByUUID", identity.uuid),
            ("nvmlDeviceGetHandleByPciBusId_v2", identity.pci_bus_id),
        ):
            if name and _call(library, function_name, ctypes.c_char_p(name.encode()), ctypes.byref(handle)) == 0:
                return cls(library, handle)
        return None

    @classmethod
    def at(cls, library: ctypes.CDLL, name: str) -> Gpu | None:
        """Return the GPU that CUDA_VISIBLE_DEVICES calls by a name: its number or UUID."""
        if not name.isdigit():
            return cls.find(library, GpuIdentity(name, ""))
        handle = ctypes.c_void_p()
        started = _call(library, "nvmlInit_v2") == 0
        index = ctypes.c_uint(int(name))
        found = started and _call(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)) == 0
        return cls(library, handle) if found else None

    def busy_percent(self) -> int | None:
        """Return how much of the last moments, up to a second, something ran on the GPU."""
        shares = (ctypes.c_uint * 2)()  # of its cores, of its memory
        status = _call(self._library, "nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(shares))
        return int(shares[0]) if status == 0 else None

    def sm_mhz(self) -> int | None:
        return self._query("nvmlDeviceGetClockInfo", _SM)

    def sm_max_mhz(self) -> int | None:
        return self._query("nvmlDeviceGetMaxClockInfo", _SM)

    def memory_mhz(self) -> int | None:
        return self._query("nvmlDeviceGetClockInfo", _MEMORY)

    def power_w(self) -> float | None:
        milliwatts = self._query("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def power_limit_w(self) -> float | None:
        milliwatts = self._query("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def temperature_c(self) -> int | None:
        return self._query("nvmlDeviceGetTemperature", _GPU_SENSOR)

    def performance_state(self) -> int | None:
        return self._query("nvmlDeviceGetPerformanceState")

    def clock_limit_bits(self) -> int | None:
        """Return why clocks are low, as bits."""
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # new, old
        answers = (self._query(name, answer=ctypes.c_ulonglong()) for name in names)
        return next((bits for bits in answers if bits is not None), None)

    def _query(
        self, function_name: str, *selectors: int, answer: ctypes.c_uint | ctypes.c_ulonglong | None = None
    ) -> int | None:
        output = ctypes.c_uint() if answer is None else answer
        status = _call(self._library, function_name, self._handle, *map(ctypes.c_uint, selectors), ctypes.byref(output))
        return int(output.value) if status == 0 else None


def load_library(name: str = LIBRARY_NAME) -> ctypes.CDLL | None:
    """Return the library; None if the machine has none."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _call(library: ctypes.CDLL, function_name: str, *args: object) -> int | None:
    """Return the library's status, 0 for success; None if it has no such function."""
    try:
        function = getattr(library, function_name)
    except AttributeError:
        return None
    return int(function(*args))
