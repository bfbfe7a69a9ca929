"""`opforge time`: one kernel on given cases, with real races on the CPU."""

from __future__ import annotations

import json
import re

import pytest

from opforge.kernels.proof import proof_path
from tests.command import opforge

SMALL = "((T([64, 33], f32),), {})"
WIDE = "((T([512, 512], f32),), {})"  # on a machine with slow calls and fast memory, fewer bytes are latency-bound
RIGHT = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"
WRONG = RIGHT.replace("<= 0", "<= 0.5")


@pytest.fixture
def root(kernel_directory):
    return kernel_directory({"relu": RIGHT})


def test_a_right_kernel_is_raced_on_each_case(root, tmp_path):
    done = opforge("time", str(root / "relu"), "--case", WIDE, "--case", SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, first, race, sol, *rest = done.stdout.splitlines()
    assert head == "relu_implementation_1 against ATen: relu.default on cpu"
    assert first == WIDE
    assert SMALL in rest  # in the order in which they were given
    assert any(line.startswith("  SOL     latency-bound: ") for line in rest)
    found = re.fullmatch(
        r"  call +kernel ([\d.]+) µs +ATen ([\d.]+) µs +× ATen ([\d.]+) \[([\d.]+), ([\d.]+)\] .*", race
    )
    assert found, race
    kernel, aten, speedup, low, high = map(float, found.groups())
    assert low <= speedup <= high
    assert kernel > 0
    assert aten > 0
    assert re.fullmatch(r"  SOL +kernel [\d.]+ % +ATen [\d.]+ % +of [\d.]+ µs, memory-bound \(2,097,152 bytes, .*", sol)
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]  # nothing is left behind


def test_json_has_the_fields_of_the_results_and_out_keeps_the_run(root, tmp_path):
    out = tmp_path / "kept"
    file = root / "relu" / "relu_implementation_1.py"
    done = opforge("time", str(file), "--case", SMALL, "--op", "relu_", "--format", "json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["op"], answer["kernel"]) == ("relu_.default", "relu_implementation_1")
    (row,) = answer["cases"]
    assert (row["verdict"], row["phase"], row["case"]) == ("passed", "performance", SMALL)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert row == json.loads((out / "results.jsonl").read_text())
    again = opforge("report", str(out))
    assert again.returncode == 0, again.stderr
    assert "relu_.default" in again.stdout


def test_a_wrong_kernel_is_not_timed(kernel_directory):
    done = opforge("time", str(kernel_directory({"relu": WRONG}) / "relu"), "--case", SMALL)
    assert done.returncode == 1
    assert "wrong, so it was not timed: result: " in done.stdout
    assert "µs" not in done.stdout


@pytest.mark.slow
def test_a_kernel_that_falls_back_is_timed_only_when_it_may(kernel_directory):
    folder = str(kernel_directory({"relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.relu(self)\n"}))
    words = ("time", f"{folder}/relu", "--case", SMALL)
    done = opforge(*words)
    assert done.returncode == 1
    assert "cheated, so it was not timed: calls aten::relu" in done.stdout
    assert opforge(*words, "--allow-fallback").returncode == 0


def test_aten_against_itself():
    done = opforge("time", "aten:add", "--case", "((T([64], f32), T([64], f32)), {'alpha': 2})", "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["op"], answer["kernel"], answer["file"]) == ("add.Tensor", "aten", None)
    assert answer["cases"][0]["rounds"] > 1


@pytest.mark.slow
def test_a_file_of_any_name_is_timed_when_its_operator_is_given(tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT)
    done = opforge("time", "mine.py", "--op", "relu", "--case", SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine against ATen: relu.default on cpu" in done.stdout


def test_a_case_that_aten_does_not_take_says_so():
    done = opforge("time", "aten:relu", "--case", "((T([4], f32), 1), {})")
    assert done.returncode == 1
    assert "ATen itself raises on this case" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["kernels/relu"], 2, "no case to time; give one or more with --case"),
        (["nosuch.py"], 2, "there is no kernel 'nosuch.py': no such file or folder"),
        (["kernels/relu", "--case", "T([4])"], 2, "not a case: 'T([4])'"),
        (["kernels/relu", "--case", "((T([4], f33),), {})"], 2, "'f33' is not a dtype"),
        (["kernels/relu", "--case", "((T([4], f32, at=0),), {})"], 2, "refers with at= to a suite's stored contents"),
        (["kernels/relu", "--case", SMALL, "--op", "rellu"], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["kernels/relu", "--case", SMALL, "--op", "mm"], 2, "--op mm (mm.default) is not one of the operators"),
        (["kernels/rellu", "--case", SMALL], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["aten:rellu", "--case", SMALL], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["aten:relu", "--case", SMALL, "--op", "relu_"], 2, "--op cannot be combined with aten:relu"),
        (["nowhere", "--case", SMALL], 2, "there is no kernel 'nowhere': no such file or folder; give a file such as"),
        (
            ["kernels", "--case", SMALL],
            5,
            "'kernels' is a folder of kernel folders: many, rellu, relu; name one of them",
        ),
        (["kernels/empty", "--case", SMALL], 5, "no kernel in 'kernels/empty': expected empty_implementation_1.py"),
        (
            ["kernels/many", "--case", SMALL],
            2,
            "several kernels in 'kernels/many': many_implementation_2.py, many_implementation_10.py; name the file of one",
        ),
        (["kernels/mine.py", "--case", SMALL], 2, "'mine.py' does not name its operator"),
        (["kernels/mine.txt", "--case", SMALL], 2, "a kernel is a Python file"),
        (["kernels/relu", "--case", SMALL, "--device", "gpu"], 2, "unknown device 'gpu'; allowed: cpu, cuda"),
        (["kernels/relu", "--case", SMALL, "--timeout", "1e300"], 2, "--timeout 1e+300 is out of range"),
        (["kernels/relu", "--case", SMALL, "--format", "xml"], 2, "unknown format 'xml'"),
        (["kernels/relu", "--case", SMALL, "--out", "kernels"], 2, "'kernels' is not empty; --out needs a new folder"),
    ],
)
def test_bad_input(words, code, message, kernel_directory, tmp_path):
    root = kernel_directory({"relu": RIGHT, "rellu": RIGHT})
    (root / "empty").mkdir()
    (root / "many").mkdir()
    for name in ("many/many_implementation_10.py", "many/many_implementation_2.py", "mine.py", "mine.txt"):
        (root / name).write_text(RIGHT)
    done = opforge("time", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]


def test_a_short_race_leaves_no_speed_in_the_proof(root):
    """Few rounds make wide intervals, in which a slower kernel looks as fast."""
    (file,) = (root / "relu").glob("*.py")
    for seconds, timed in (("0.1", False), ("1", True)):
        done = opforge("time", str(file), "--case", SMALL, "--race-seconds", seconds)
        assert done.returncode == 0, done.stderr
        proof = json.loads(proof_path(file).read_text())
        assert ("timed" in proof["operators"]["relu.default"]["float32"]) is timed


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_a_race_without_time_or_without_end_is_refused(root, seconds):
    done = opforge("time", str(root / "relu"), "--case", SMALL, OPFORGE_RACE_SECONDS=seconds)
    assert done.returncode == 2
    assert f"--race-seconds {float(seconds)} is out of range; it must be 0.1 to 600" in done.stderr
