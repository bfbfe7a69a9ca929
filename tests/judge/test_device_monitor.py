"""What the state of a device says of a race: against a small library with NVML's functions, and files like the system's."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opforge.judge.timing.device_monitor import DeviceMonitor
from opforge.judge.timing.nvml import GpuIdentity

SOURCE = r"""
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
/* A GPU with the number 7: its state is what the environment says. */
static int device;
static unsigned setting(const char *name) { const char *s = getenv(name); return s ? (unsigned)strtoul(s, 0, 0) : 0; }
int nvmlInit_v2(void) { return setting("GPU_BROKEN") ? 9 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-seven")) return 6;
    *handle = &device; return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    if (strcmp(bus, "00000000:1a:00.0")) return 6;
    *handle = &device; return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index != 7) return 6;
    *handle = &device; return 0;
}
static int known(void *handle) { return handle == &device ? 0 : 2; }
int nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *mhz) { *mhz = setting(type == 1 ? "GPU_SM" : "GPU_MEMORY"); return known(h); }
int nvmlDeviceGetMaxClockInfo(void *h, unsigned type, unsigned *mhz) { *mhz = type == 1 ? 1980 : 3201; return known(h); }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = setting("GPU_MILLIWATT"); return known(h); }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { *mw = 700000; return known(h); }
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *c) { *c = 61; return sensor ? 2 : known(h); }
int nvmlDeviceGetPerformanceState(void *h, unsigned *state) { *state = 0; return setting("GPU_NO_STATE") ? 3 : known(h); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) { *bits = setting("GPU_REASONS"); return known(h); }
int nvmlDeviceGetUtilizationRates(void *h, unsigned *shares) { shares[0] = setting("GPU_BUSY"); shares[1] = 1; return known(h); }
"""

SEVEN = GpuIdentity("GPU-seven", "00000000:1a:00.0")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build a library with NVML's functions")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "nvml.so", folder / "nvml.c"], check=True)
    return ctypes.CDLL(str(folder / "nvml.so"))


@pytest.fixture
def gpu(library, monkeypatch, tmp_path) -> Callable[..., DeviceMonitor]:
    """Return a function that watches a GPU through states of clock and reasons, one sample in each."""
    monkeypatch.setenv("GPU_MEMORY", "2619")

    def watch(*states: tuple[int, int], identity: GpuIdentity = SEVEN) -> DeviceMonitor:
        made = DeviceMonitor("cuda:0", library=library, identify=lambda _device: identity, root=tmp_path)
        for mhz, reasons in states:
            monkeypatch.setenv("GPU_SM", str(mhz))
            monkeypatch.setenv("GPU_REASONS", str(reasons))
            monkeypatch.setenv("GPU_MILLIWATT", str(mhz * 100))
            made.sample()
        return made

    return watch


def test_a_steady_gpu_has_figures_and_no_remarks(gpu):
    watch = gpu((1965, 0), (1980, 0), (1975, 0))
    assert watch.figures() == {
        "sm_mhz_low": 1965, "sm_mhz_high": 1980, "sm_mhz_most": 1980, "memory_mhz": 2619, "power_w": 198.0,
        "power_limit_w": 700.0, "temperature_c": 61, "performance_state": "P0",
    }  # fmt: skip
    assert watch.notes() == []


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x4, "power cap"),
        (0x8, "hardware slowdown"),
        (0x20, "thermal limit (software)"),
        (0x40, "thermal limit (hardware)"),
        (0x80, "power brake"),
        (0x44, "power cap, thermal limit (hardware)"),
    ],
)
def test_a_throttled_gpu_is_said_to_be(gpu, bits, words):
    watch = gpu((1980, 0), (1980, bits), (1980, 0))
    assert watch.notes() == [f"the GPU was throttled during timing: {words}"]
    assert watch.figures()["reasons"] == words.split(", ")


@pytest.mark.parametrize("bits", [0x1, 0x2, 0x10, 0x100])
def test_resting_and_what_the_user_set_is_no_throttling(gpu, bits):
    assert gpu((1980, bits), (1980, bits)).notes() == []


def test_a_clock_that_moves_is_said_and_one_that_wakes_up_is_not(gpu):
    assert gpu((1980, 0), (1900, 0)).notes() == ["the GPU's clock changed during timing: between 1900 and 1980 MHz"]
    assert gpu((345, 0x1), (1980, 0), (1975, 0)).notes() == []
    assert gpu((345, 0x1), (1980, 0)).figures()["sm_mhz_low"] == 1980


def test_a_gpu_is_found_by_its_bus_where_its_uuid_is_unknown(gpu):
    assert gpu((1980, 0), identity=GpuIdentity("", SEVEN.pci_bus_id)).figures()["sm_mhz_high"] == 1980
    assert gpu((1980, 0), identity=GpuIdentity("GPU-other", SEVEN.pci_bus_id)).figures()["sm_mhz_high"] == 1980


def test_what_is_not_there_leaves_no_figures_and_one_remark(gpu, library, monkeypatch, tmp_path):
    stranger = gpu((1980, 0), identity=GpuIdentity("GPU-other", "00000000:2b:00.0"))
    assert stranger.figures() == {}
    assert len(stranger.notes()) == 1
    assert "NVML" in stranger.notes()[0]
    monkeypatch.setenv("GPU_BROKEN", "1")
    assert gpu((1980, 0)).figures() == {}
    without = DeviceMonitor(
        "cuda", library=ctypes.CDLL(None), identify=lambda _device: SEVEN, root=tmp_path
    )  # no such functions
    without.sample()
    assert without.figures() == {}


def test_what_a_gpu_does_not_say_is_left_out(gpu, monkeypatch):
    monkeypatch.setenv("GPU_NO_STATE", "1")
    assert "performance_state" not in gpu((1980, 0)).figures()


class _System:
    """Files like those in /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def state(self, mhz: list[int], load: float, busy: int, stolen: int) -> None:
        for core, value in enumerate(mhz):
            self.write(f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{value * 1000}\n")
        self.write("proc/loadavg", f"{load} 0.5 0.4 1/99 1234\n")
        self.write("proc/stat", f"cpu  {busy} 0 0 1000 0 0 0 {stolen} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


def test_a_quiet_cpu(tmp_path):
    system = _System(tmp_path)
    system.state([800, 3500], 0.5, 1000, 0)
    system.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    watch = DeviceMonitor("cpu", root=tmp_path)
    watch.sample()
    system.state([3480, 800], 0.5, 2000, 0)  # the work moved to another core
    watch.sample()
    assert watch.figures() == {"mhz_low": 3480, "mhz_high": 3500, "governor": "performance", "load": 0.5, "stolen": 0}
    assert watch.notes() == []


def test_a_disturbed_cpu_is_said_to_be(tmp_path):
    system = _System(tmp_path)
    load = (os.cpu_count() or 1) + 0.5
    system.state([3500], 0.5, 1000, 0)
    watch = DeviceMonitor("cpu", root=tmp_path)
    watch.sample()
    system.state([2800], load, 1900, 100)
    watch.sample()
    assert watch.notes() == [
        "the CPU's clock changed during timing: between 2800 and 3500 MHz",
        f"the machine was busy with other work: a load of {load:g} on {os.cpu_count()} core(s)",
        "other virtual machines took 10% of the time during timing",
    ]


def test_a_system_that_says_nothing_is_no_failure(tmp_path):
    watch = DeviceMonitor("cpu", root=tmp_path)
    watch.sample()
    watch.sample()
    assert (watch.figures(), watch.notes()) == ({}, [])


def test_without_frequencies_the_list_of_processors_says_the_clock(tmp_path):
    _System(tmp_path).write(
        "proc/cpuinfo", "processor : 0\ncpu MHz\t\t: 2100.000\n\nprocessor : 1\ncpu MHz\t\t: 2101.5\n"
    )
    assert DeviceMonitor("cpu", root=tmp_path).figures() == {"mhz_low": 2100.0, "mhz_high": 2101.5}


def test_this_machine_can_be_watched():
    watch = DeviceMonitor("cpu")
    watch.sample()
    watch.sample()
    assert watch.figures()["load"] >= 0
