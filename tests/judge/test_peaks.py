"""Peaks are measured once in a process of their own, kept, and measured anew when the file is damaged."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from opforge.errors import InternalError
from opforge.judge.kinds import Kind
from opforge.judge.peaks import Peaks, known_peaks, path_of

PEAKS = Peaks(
    device="a device",
    kind="cuda",
    curve=((1 << 10, 50.0), (1 << 20, 80.0), (1 << 26, 20.0), (1 << 28, 10.0)),
    in_place_curve=((1 << 20, 70.0), (1 << 26, 30.0)),
    rates={Kind.F32_PRODUCT: 5.0, Kind.BF16_PRODUCT: 9.0},
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
    assert PEAKS.rate(Kind.F32) == 5
    assert PEAKS.rate(Kind.INTEGER) == 5
    assert PEAKS.rate(Kind.F16_PRODUCT) == 9
    assert PEAKS.rate(Kind.F64) is None
    assert PEAKS.fastest == 9


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
    with pytest.raises(ValueError, match="no peaks of a device"):
        Peaks.from_json({**PEAKS.as_json(), **damage})


@pytest.mark.slow
def test_they_are_measured_once_and_again_when_the_file_is_damaged(shared_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    spawner = shared_server.spawner
    first = known_peaks(spawner, "cpu")
    (kept,) = (tmp_path / "peaks").rglob("*.json")
    assert kept == path_of(first.device)
    kept.write_text(json.dumps({**first.as_json(), "busy": False}))
    first = replace(first, busy=False)
    assert known_peaks(spawner, "cpu") == first  # times differ: a second measurement would give other numbers
    kept.write_text(kept.read_text()[:100])
    again = known_peaks(spawner, "cpu")
    assert again != first
    assert Peaks.from_json(json.loads(kept.read_text())) == again
    assert known_peaks(spawner, "cpu", anew=True) != again


@pytest.mark.slow
def test_those_of_a_busy_machine_are_measured_again_after_an_hour_and_the_better_kept(
    shared_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    first = known_peaks(shared_server.spawner, "cpu")
    slow = tuple((size, 1.0) for size, _ in first.curve[:-1])
    busy = replace(first, curve=(*slow, (first.curve[-1][0], 1e15)), busy=True)
    path = path_of(first.device)
    path.write_text(json.dumps(busy.as_json()))
    _aged(path, 50 * 60)
    assert known_peaks(shared_server.spawner, "cpu") == busy
    _aged(path, 61 * 60)
    again = known_peaks(shared_server.spawner, "cpu")
    assert again.curve[-1][1] == 1e15
    assert any(dict(again.curve)[size] > poor for size, poor in slow)  # a size may go without, under load
    assert Peaks.from_json(json.loads(path.read_text())) == again


def test_those_of_a_quiet_machine_are_kept_however_old(shared_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    quiet = replace(known_peaks(shared_server.spawner, "cpu"), busy=False)
    path = path_of(quiet.device)
    path.write_text(json.dumps(quiet.as_json()))
    _aged(path, 400 * 24 * 3600)
    assert known_peaks(shared_server.spawner, "cpu") == quiet


def _aged(path, seconds):
    """Let a file be that old."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_the_better_of_two_is_taken_each_for_itself():
    other = replace(PEAKS, curve=((1 << 20, 90.0), (1 << 30, 5.0)), rates={Kind.F64: 3.0}, launch_us=1.0, call_us=6.0)
    best = PEAKS.with_better(other)
    assert best.curve == ((1 << 10, 50.0), (1 << 20, 90.0), (1 << 26, 20.0), (1 << 28, 10.0), (1 << 30, 5.0))
    assert best.rates == {Kind.F32_PRODUCT: 5.0, Kind.BF16_PRODUCT: 9.0, Kind.F64: 3.0}
    assert (best.launch_us, best.call_us) == (1.0, 4.0)


def test_what_is_measured_on_a_cpu_makes_sense(shared_server):
    found = known_peaks(shared_server.spawner, "cpu")
    assert found.kind == "cpu"
    assert found.launch_us is None
    assert found.bandwidth(1 << 12) >= found.bandwidth(1 << 30) > 1e8
    assert found.rate(Kind.F32_PRODUCT) > 1e9
    assert Kind.TF32_PRODUCT not in found.rates


def test_a_device_that_cannot_be_measured_is_said(shared_server):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InternalError, match="peaks of device 'cuda'"):
        known_peaks(shared_server.spawner, "cuda")
