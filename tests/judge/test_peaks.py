"""Peaks are measured once in a process of their own, kept, and measured anew when the file is damaged."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from opforge.errors import InternalError
from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.peaks import Peaks, cache_path, load_or_measure

PEAKS = Peaks(
    device="a device",
    device_type="cuda",
    bandwidth_curve=((1 << 10, 50.0), (1 << 20, 80.0), (1 << 26, 20.0), (1 << 28, 10.0)),
    in_place_curve=((1 << 20, 70.0), (1 << 26, 30.0)),
    rates={ArithmeticKind.F32_MATMUL: 5.0, ArithmeticKind.BF16_MATMUL: 9.0},
    launch_us=1.5,
    call_us=4.0,
)


@pytest.mark.parametrize(
    ("footprint", "rate"),
    [(0, 80), (1 << 10, 80), (1 << 20, 80), ((1 << 26) - 1, 80), (1 << 26, 20), (1 << 27, 20), (1 << 28, 10), (1 << 40, 10)],
)  # fmt: skip
def test_between_two_sizes_the_faster_counts_and_a_smaller_set_is_never_slower(footprint, rate):
    assert PEAKS.bandwidth(footprint) == rate


def test_memory_that_is_written_back_has_a_curve_of_its_own():
    assert PEAKS.bandwidth(1 << 20, in_place=True) == 80
    assert PEAKS.bandwidth(1 << 26, in_place=True) == 30


def test_a_rate_that_was_not_measured_is_a_neighbours_or_none():
    assert PEAKS.rate(ArithmeticKind.F32) == 5
    assert PEAKS.rate(ArithmeticKind.INTEGER) == 5
    assert PEAKS.rate(ArithmeticKind.F16_MATMUL) == 9
    assert PEAKS.rate(ArithmeticKind.F64) is None
    assert PEAKS.fastest_rate == 9


def test_json_and_back():
    assert Peaks.from_json(json.loads(json.dumps(PEAKS.as_json()))) == PEAKS


@pytest.mark.parametrize(
    "damage",
    [
        {"bandwidth": []},
        {"bandwidth": [[1024, -1.0]]},
        {"bandwidth": [[2048, 1.0], [1024, 1.0]]},
        {"rates": {"f3": 1.0}},
        {"rates": {"f32": float("inf")}},
        {"call_us": None},
        {"kind": "abacus"},
    ],
)
def test_damaged_peaks_are_refused(damage):
    with pytest.raises(ValueError, match="not the peaks of a device"):
        Peaks.from_json({**PEAKS.as_json(), **damage})


@pytest.mark.slow
def test_they_are_measured_once_and_again_when_the_file_is_damaged(shared_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    spawner = shared_server.spawner
    first = load_or_measure(spawner, "cpu")
    (kept,) = (tmp_path / "peaks").rglob("*.json")
    assert kept == cache_path(first.device)
    kept.write_text(json.dumps({**first.as_json(), "busy": False}))
    first = replace(first, measured_while_busy=False)
    assert load_or_measure(spawner, "cpu") == first  # times differ: a second measurement would give other numbers
    kept.write_text(kept.read_text()[:100])
    again = load_or_measure(spawner, "cpu")
    assert again != first
    assert Peaks.from_json(json.loads(kept.read_text())) == again
    assert load_or_measure(spawner, "cpu", remeasure=True) != again


@pytest.mark.slow
def test_those_of_a_busy_machine_are_measured_again_after_an_hour_and_the_better_kept(
    shared_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    first = load_or_measure(shared_server.spawner, "cpu")
    slow = tuple((size, 1.0) for size, _ in first.bandwidth_curve[:-1])
    busy = replace(first, bandwidth_curve=(*slow, (first.bandwidth_curve[-1][0], 1e15)), measured_while_busy=True)
    path = cache_path(first.device)
    path.write_text(json.dumps(busy.as_json()))
    _aged(path, 50 * 60)
    assert load_or_measure(shared_server.spawner, "cpu") == busy
    _aged(path, 61 * 60)
    again = load_or_measure(shared_server.spawner, "cpu")
    assert again.bandwidth_curve[-1][1] == 1e15
    assert any(dict(again.bandwidth_curve)[size] > poor for size, poor in slow)  # a size may go without, under load
    assert Peaks.from_json(json.loads(path.read_text())) == again


def test_those_of_a_quiet_machine_are_kept_however_old(shared_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    quiet = replace(load_or_measure(shared_server.spawner, "cpu"), measured_while_busy=False)
    path = cache_path(quiet.device)
    path.write_text(json.dumps(quiet.as_json()))
    _aged(path, 400 * 24 * 3600)
    assert load_or_measure(shared_server.spawner, "cpu") == quiet


def _aged(path, seconds):
    """Let a file be that old."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_the_better_of_two_is_taken_each_for_itself():
    other = replace(
        PEAKS,
        bandwidth_curve=((1 << 20, 90.0), (1 << 30, 5.0)),
        rates={ArithmeticKind.F64: 3.0},
        launch_us=1.0,
        call_us=6.0,
    )
    best = PEAKS.merge_best(other)
    assert best.bandwidth_curve == ((1 << 10, 50.0), (1 << 20, 90.0), (1 << 26, 20.0), (1 << 28, 10.0), (1 << 30, 5.0))
    assert best.rates == {ArithmeticKind.F32_MATMUL: 5.0, ArithmeticKind.BF16_MATMUL: 9.0, ArithmeticKind.F64: 3.0}
    assert (best.launch_us, best.call_us) == (1.0, 4.0)


def test_what_is_measured_on_a_cpu_makes_sense(shared_server):
    found = load_or_measure(shared_server.spawner, "cpu")
    assert found.device_type == "cpu"
    assert found.launch_us is None
    assert found.bandwidth(1 << 12) >= found.bandwidth(1 << 30) > 1e8
    assert found.rate(ArithmeticKind.F32_MATMUL) > 1e9
    assert ArithmeticKind.TF32_MATMUL not in found.rates


def test_a_device_that_cannot_be_measured_is_said(shared_server):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InternalError, match="peaks of device 'cuda'"):
        load_or_measure(shared_server.spawner, "cuda")
