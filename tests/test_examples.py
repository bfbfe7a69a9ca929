"""The example kernels do what docs/judge.md says of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.command import opforge
from tests.conftest import NOT_PROOFS, ROOT, verdicts

EXAMPLES = ROOT / "examples"


FILES = sorted(EXAMPLES.glob("*_kernels/*/*.py"))
RUNS_EACH = """
import json, os, runpy, sys, tempfile, torch
for file in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            sys.argv = [file]
            runpy.run_path(file, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([file, code, said.read()]), flush=True)
"""
"""Does what `python FILE` does, for each file in a process forked from one that has imported torch."""


@pytest.fixture(scope="module")
def alone():
    """Return how each file ends when it is run by itself, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS_EACH, *map(str, FILES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {row[0]: row[1:] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda p: f"{p.parts[-3]}/{p.stem}")
def test_a_kernel_file_runs_alone(file, alone):
    code, said = alone[str(file)]
    assert code == 0, said
    assert said


@pytest.mark.slow
def test_honest_kernels_are_right(tmp_path):
    words = (
        "--ops-directory",
        str(EXAMPLES / "generated_kernels"),
        "--dtypes",
        "f32,bf16,bool",
        "--out",
        str(tmp_path / "run"),
    )
    done = opforge("run", "--suite", "opinfo", "--backend", "directory", *words, "--format", "json")
    answer = json.loads(done.stdout)
    assert [o for o in answer["operators"] if o["reasons"] and not o["declined"]] == []
    assert done.returncode == 0
    served = {o["op"] for o in answer["operators"] if o["kernel"]}
    assert served >= {
        "relu_.default",
        "sigmoid.out",
        "sum.default",
        "_softmax.default",
        "native_layer_norm.default",
        "mm.out",
        "silu_.default",
    }


def test_wrong_kernels_are_caught(tmp_path):
    words = ("--ops-directory", str(EXAMPLES / "wrong_kernels"), "--dtypes", "f32,bf16", "--out", str(tmp_path / "run"))
    done = opforge("run", "--suite", "opinfo", "--backend", "directory", *words, "--format", "json")
    assert done.returncode == 1
    reasons = {
        o["op"]: {(r["verdict"]) for r in o["reasons"]} for o in json.loads(done.stdout)["operators"] if o["kernel"]
    }
    assert "wrong" in reasons["neg.default"]
    assert "wrong" in reasons["sigmoid.default"]
    assert "contract" in reasons["relu.default"]
    assert reasons["abs.default"] == {"crashed"}


def test_cheating_kernels_are_named(tmp_path):
    words = ("--ops-directory", str(EXAMPLES / "cheating_kernels"), "--dtypes", "f32", "--out", str(tmp_path / "run"))
    done = opforge("run", "--suite", "opinfo", "--backend", "directory", *words, "--format", "json")
    assert done.returncode == 1
    operators = {o["op"]: o for o in json.loads(done.stdout)["operators"] if o["kernel"]}
    for op in ("abs.default", "neg.default", "exp.default"):
        assert operators[op]["reasons"][0]["verdict"] == "cheated"


FEW = {
    "relu.default": ["((T([7, 33], f32),), {})"],
    "silu.default": ["((T([7, 33], f32),), {})"],
    "sigmoid.default": ["((T([7, 33], f32),), {})"],
    "gelu.default": ["((T([7, 33], f32),), {})", "((T([7, 33], f32),), {'approximate': 'tanh'})"],
    "gelu_backward.default": ["((T([5, 9], f32), T([5, 9], f32)), {})"],
    "silu_backward.default": ["((T([5, 9], f32), T([5, 9], f32)), {})"],
    "add.Tensor": ["((T([5, 9], f32), T([9], f32)), {'alpha': 2})"],
    "mul.Tensor": ["((T([5, 9], f32), T([5, 1], f32)), {})"],
    "_softmax.default": ["((T([5, 9], f32), -1, False), {})", "((T([5, 9], f32), 0, False), {})"],
    "native_layer_norm.default": ["((T([5, 9], f32), [9], T([9], f32), T([9], f32), 1e-05), {})"],
    "mm.default": ["((T([5, 9], f32), T([9, 3], f32)), {})"],
    "addmm.default": ["((T([3], f32), T([5, 9], f32), T([9, 3], f32)), {})"],
    "bmm.default": ["((T([2, 5, 9], f32), T([2, 9, 3], f32)), {})"],
}


@pytest.mark.slow
def test_triton_kernels_are_right_in_the_interpreter(judge_tiny, tmp_path):
    """In float32, which is what they have there: the interpreter has no other float that is right."""
    shutil.copytree(EXAMPLES / "triton_kernels", tmp_path / "kernels", ignore=NOT_PROOFS)
    assert {folder.name for folder in (tmp_path / "kernels").iterdir()} == {op.split(".")[0] for op in FEW}
    found = verdicts(judge_tiny(tmp_path / "kernels", FEW, timeout_s=120.0))
    assert found == {op: {("passed", "")} for op in FEW}


def test_the_demo_stops_without_a_folder_for_its_runs(tmp_path):
    nowhere = tmp_path / "gone"
    done = subprocess.run(
        ["sh", str(EXAMPLES / "demo.sh")], env={**os.environ, "TMPDIR": str(nowhere)}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 1
    assert f"no folder for the runs can be made in {nowhere}; set TMPDIR" in done.stderr
    assert done.stdout == ""
