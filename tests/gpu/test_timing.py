"""Races on a GPU: graphs and events, all figures, and kernels that do less when they are captured. Run with `pytest -m gpu`."""

from __future__ import annotations

import json

import pytest

from tests.command import opforge

pytestmark = pytest.mark.gpu

WIDE = "((T([1024, 1024], f32),), {})"
QKV = "T([2, 4, 64, 32], f16)"
TIMES = {"kernel_us", "aten_us", "speedup", "low", "high", "rounds", "set_aside", "calls"}
RELU = """
    import torch
    def relu_kernel_impl(self):
        {first}
        return torch.where(self <= 0, 0, self)
"""


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def timed(kernel, text=WIDE, *words, code=0):
    """Return the row of one case, judged and timed by the command line."""
    done = opforge("time", str(kernel), "--device", "cuda", "--case", text, "--format", "json", *words)
    assert done.returncode == code, done.stderr + done.stdout
    (row,) = json.loads(done.stdout)["cases"]
    return row


def check_figures(row, timed="device"):
    """See that all figures of a race on a GPU are there, and agree with each other."""
    assert row["verdict"] == "passed"
    assert row["timed"] == timed
    assert set(row["device"]) == TIMES | {"method", "cache"}
    assert set(row["call"]) == set(row["sync"]) == TIMES
    for measurement in (row["device"], row["call"], row["sync"]):
        assert 0 < measurement["low"] <= measurement["speedup"] <= measurement["high"]
        assert min(measurement["kernel_us"], measurement["aten_us"]) > 0
    assert row["device"]["rounds"] + row["device"]["set_aside"] >= 8
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == tuple(
        row[timed][name] for name in ("speedup", "low", "high")
    )


def test_smoke_has_every_figure(tmp_path):
    out = tmp_path / "run"
    done = opforge("run", "--suite", "smoke", "--backend", "aten", "--device", "cuda", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["phase"] == "performance"]
    check_figures(row)
    assert row["device"]["method"] == "graph"
    assert row["device"]["cache"] in ("cold", "warm")
    assert row["sync"]["aten_us"] > row["device"]["aten_us"]
    assert set(row["sol"]) == {"bytes", "flops", "us", "bound", "kernel", "aten", "counted"}
    assert (row["sol"]["bytes"], row["sol"]["bound"]) == (8 << 20, "memory")
    assert 0 < row["sol"]["kernel"] < 130
    assert 0 < row["clocks"]["sm_mhz_low"] <= row["clocks"]["sm_mhz_high"]
    assert row["clocks"]["power_w"] > 0
    assert json.loads((out / "manifest.json").read_text())["peaks"]["launch_us"] > 0


def test_inputs_that_do_not_fit_the_cache_are_cold_and_one_element_is_launch_bound():
    large = timed("aten:relu", "((T([16, 1024, 1024], f32),), {})")
    check_figures(large)
    assert large["device"]["cache"] == "cold"
    assert "launch_bound" not in large
    small = timed("aten:relu", "((T([1], f32),), {})")
    check_figures(small)
    assert small["device"]["cache"] == "warm"
    assert small["launch_bound"] is True


def test_of_a_kernel_that_cannot_be_captured_calls_in_a_row_count(kernel_directory):
    waits = RELU.replace("{first}", "assert self.numel() == 0 or self.flatten()[0].item() is not None")
    row = timed(kernel_directory({"relu": waits}) / "relu")
    check_figures(row, timed="call")
    assert row["device"]["method"] == "events"
    assert any(note.startswith("calls in a row are timed, not the device's time") for note in row["notes"])


def test_a_kernel_whose_launch_takes_long_is_not_held_to_lie(kernel_directory):
    slow = RELU.replace("{first}", "sum(range(300_000))")
    row = timed(kernel_directory({"relu": slow}) / "relu")
    check_figures(row)
    assert row["sync"]["kernel_us"] > 2 * row["sync"]["aten_us"]


def test_a_kernel_that_does_less_when_it_is_captured_is_a_cheat(kernel_directory):
    lazy = RELU.replace("{first}", "if torch.cuda.is_current_stream_capturing(): return torch.empty_like(self)")
    row = timed(kernel_directory({"relu": lazy}) / "relu", code=1)
    assert row["verdict"] == "cheated"
    assert row["reason"].startswith("an output of a timed call is wrong: ")
    assert "speedup" not in row


def test_a_kernel_that_gives_one_buffer_to_all_captured_calls_does_not_pass(kernel_directory):
    shared = """
        import torch
        kept = {}
        def relu_kernel_impl(self):
            right = torch.where(self <= 0, 0, self)
            if not torch.cuda.is_current_stream_capturing():
                return right
            return kept.setdefault(self.shape, torch.empty_like(self)).copy_(right)
    """
    row = timed(kernel_directory({"relu": shared}) / "relu", code=1)
    assert row["verdict"] == "cheated"
    assert "speedup" not in row


def test_a_kernel_that_does_its_work_twice_takes_twice_as_long(kernel_directory):
    twice = """
        import torch
        def mm_kernel_impl(self, mat2):
            torch.mm(mat2, self)
            return torch.mm(self, mat2)
    """
    text = "((T([1024, 1024], f32), T([1024, 1024], f32)), {})"
    row = timed(kernel_directory({"mm": twice}) / "mm", text, "--allow-fallback")
    check_figures(row)
    assert 1 / 3 < row["speedup"] < 1 / 1.5


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("native_dropout", "((T([256, 256], f32), 0.5, True), {})"),
        ("bernoulli", "((T([256, 256], f32, low=0, high=1),), {})"),
        ("rand_like", "((T([256, 256], f32),), {})"),
        ("relu_", WIDE),
        ("add.out", "((T([256, 256], f32), T([256, 256], f32)), {'out': T([256, 256], f32)})"),
        ("bitwise_and.Tensor", "((T([256, 256], i64), T([256, 256], i64)), {})"),
        ("relu_", "((T([75000000], f32),), {})"),
        ("_scaled_dot_product_efficient_attention", f"(({QKV}, {QKV}, {QKV}, None, True, 0.1), {{}})"),
        ("_scaled_dot_product_efficient_attention", f"(({QKV}, {QKV}, {QKV}, None, True), {{}})"),
    ],
    ids=[
        "dropout",
        "bernoulli",
        "rand_like",
        "in place",
        "out",
        "integers",
        "in place, one call at a time",
        "attention",
        "attention without dropout",
    ],
)
def test_operators_of_every_kind_are_timed(op, text):
    check_figures(timed(f"aten:{op}", text, "--timeout", "120"))


def test_calls_with_an_input_on_the_host_are_timed_one_after_another():
    row = timed("aten:fill_.Tensor", "((T([16, 49], f32, stride=(196, 1)), T([], f32, device='cpu')), {})")
    check_figures(row, "call")
    assert any("inputs on the host" in note for note in row["notes"])
