"""What judges do with their time, and how busy their GPUs are: against a library with NVML's functions, and a clock set by hand."""

from __future__ import annotations

import pytest

from opforge.judge.timing.nvml import Gpu
from opforge.runs.execute.activity import ActivityRecorder, TimeUse
from opforge.runs.manifest import Activity
from tests.judge.test_device_monitor import library  # noqa: F401

JUDGING, TIMING, WAITING = TimeUse


@pytest.mark.parametrize(("name", "is_there"), [("7", True), ("GPU-seven", True), ("8", False), ("GPU-eight", False)])
def test_gpus_are_found_by_the_names_that_cuda_visible_devices_has(library, name, is_there):  # noqa: F811
    assert (Gpu.at(library, name) is not None) is is_there


def test_the_time_of_each_judge_counts_and_the_gpu_is_asked_now_and_then(library, monkeypatch):  # noqa: F811
    now = [100.0]
    gpu = Gpu.at(library, "7")
    assert gpu is not None
    recorder = ActivityRecorder([gpu], clock=lambda: now[0])
    for seconds, busy, uses in (
        (1.0, 20, [JUDGING, JUDGING]),
        (0.1, 100, [JUDGING, WAITING]),  # too soon after the last sample
        (2.0, 60, [TIMING, WAITING]),
        (3.0, 40, []),
    ):
        now[0] += seconds
        monkeypatch.setenv("GPU_BUSY", str(busy))
        recorder.advance(uses)
    spent = recorder.activity()
    assert spent == Activity(judging_s=2.1, timing_s=2.0, waiting_s=2.1, gpu_busy=pytest.approx(0.4))
    assert str(spent) == "judging 2.1 s, timing 2.0 s, waiting 2.1 s; GPU busy 40% of the time"


def test_without_a_gpu_its_load_is_unknown():
    recorder = ActivityRecorder()
    recorder.advance([])
    assert recorder.activity() == Activity()
    assert str(recorder.activity()) == "none"
