"""A model with kernels in place on the terminal: calls, times, results, and who is to blame."""

from __future__ import annotations

import io
import shlex
from typing import Any

from rich.console import Console

from opforge.reports.model import print_model_report

CASE = "((T([2], f32),), {})"
RIGHT = {"name": "output", "right": True, "error": 1e-7, "bound": 1e-6, "aten_error": 1e-7}
WRONG = {**RIGHT, "right": False, "error": 0.25, "reason": "output: error 0.25, allowed 1e-06 (ATen's own 1e-07)"}


def kernel(name: str, calls: int = 1, **fields: Any) -> dict[str, Any]:
    row = {"kernel": name, "calls": calls, "fallbacks": 0, "fallback_reasons": {}, "refused": {}}
    return {**row, "ops": {f"{name}.default": calls} if calls else {}, **fields}


def report(**fields: Any) -> dict[str, Any]:
    head = {"model": "net.py", "backend": "directory", "device": "cpu", "dtype": "f32", "train": False}
    rest = {"verdict": "passed", "reason": "", "kernels": [kernel("relu")], "results": [RIGHT]}
    return {**head, **rest, "remarks": [], "notes": [], **fields}


def shown(**fields: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=140)
    print_model_report(console, report(**fields))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def guilty(name: str, **fields: Any) -> dict[str, Any]:
    row = {"kernel": name, "verdict": "wrong", "reason": "result: off by 0.25", "file": f"my kernels/{name}.py"}
    first = {"number": 3, "phase": "forward", "op": f"{name}.default", "case": CASE, "verdict": "wrong", "reason": "r"}
    return {**row, "calls": 9, "looked_at": 4, "largest_share_of_bound": 0.5, "first": {**first, **fields}}


def test_right_kernels_with_their_times():
    times = {"kernel_us": 12.345, "kernel_us_range": [10.0, 1500.0], "aten_us": 2.0, "aten_us_range": [1.0, 3.0]}
    whole = {"kernel_us": 1500.0, "aten_us": 3.0, "speedup": 0.5, "low": 0.4, "high": 0.6, "rounds": 40, "calls": 2}
    rows = [kernel("tanh", 0), kernel("relu", 5, **times)]
    lines = shown(train=True, kernels=rows, time=whole)
    assert lines[0] == "net.py with directory on cpu (f32, training): passed"
    assert lines[1].split() == ["kernel", "calls", "fell", "back", "kernel", "µs", "ATen", "µs", "operators"]
    assert " ".join(lines[2].split()) == "relu 5 0 12.3 [10, 1500] 2 [1, 3] relu.default 5"
    assert " ".join(lines[3].split()) == "tanh 0 0 not called"
    assert "results      1 of 1 right" in lines
    assert lines[-1].startswith("time         with kernels 1.5 ms, without 3 µs, × ATen 0.5")
    assert lines[-1].endswith(", 40 rounds of 2")


def test_what_did_not_run_as_it_should_is_said_with_its_reason():
    rows = [
        kernel("relu", fallbacks=2, fallback_reasons={"NotImplementedError: only float32": 2}),
        kernel("neg", 0, verdict="error", reason="cannot be loaded: [no]"),
        kernel("abs", 0, refused={"abs.default": "has no proof", "abs.out": "has no proof"}),
    ]
    lines = shown(kernels=rows, remarks=["one"], notes=["two"], results=[])
    assert lines[-6:] == [
        "fell back relu, 2×: NotImplementedError: only float32",
        "error neg: cannot be loaded: [no]",
        "not installed abs: has no proof",
        "note one",
        "note two",
        "results      none",
    ]


def test_wrong_results_are_shown_up_to_a_number():
    wrong = [{**WRONG, "reason": f"output[{number}]: error 0.25"} for number in range(10)]
    lines = shown(verdict="wrong", reason="output[0] differs", results=[*wrong, RIGHT])
    assert lines[-11:] == [
        "results      1 of 11 right",
        "  wrong: output[0] differs",
        *(f"  output[{number}]: error 0.25" for number in range(8)),
        "  … and 2 more (--format json lists all)",
    ]


def test_the_guilty_kernel_comes_with_the_command_that_shows_its_fault():
    lines = shown(verdict="wrong", blame={"guilty": [guilty("relu")], "together": [], "trials": 5})
    assert lines[-5:-2] == [
        "caused by    relu, wrong by itself: result: off by 0.25",
        f"  first wrong call: 4 of 9 (forward): relu.default {CASE}",
        "    wrong: r",
    ]
    words = ["opforge", "time", "my kernels/relu.py", "--op", "relu.default", "--case", CASE]
    assert shlex.split(lines[-2]) == words
    assert lines[-1] == "found in 5 more runs of the model"


def test_kernels_that_fail_only_together():
    innocent = {**guilty("mul"), "first": None}
    pair = [guilty("add", also_with_seeded_contents=False), innocent]
    lines = shown(verdict="wrong", blame={"guilty": [], "together": [pair], "trials": 7})
    assert "caused by    add, mul: wrong with all of them, right without any one" in lines
    assert "    right with seeded contents of the same shapes: the error depends on the values" in lines
    assert "  mul: each of 4 calls is within its bound by itself; the largest error is 50% of its bound" in lines


def test_when_nobody_is_to_blame_that_is_said():
    lines = shown(verdict="wrong", blame={"guilty": [], "together": [], "trials": 2})
    assert lines[-2] == "caused by    unknown: no set of kernels fails by itself"
