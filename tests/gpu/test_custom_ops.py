"""Operators of users' own, and the kernels of another package, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.command import opforge
from tests.conftest import ROOT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def rows_of(tmp_path, *words, code):
    done = opforge("run", *words, "--device", "cuda", "--out", str(tmp_path / "run"))
    assert done.returncode == code, done.stdout + done.stderr
    return [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]


def test_inputs_that_name_no_device_are_made_on_the_gpu(tmp_path):
    words = (
        "--suite",
        "custom_ops",
        "--backend",
        "custom_ops",
        "--custom-ops-root",
        str(ROOT / "examples" / "custom_ops"),
    )
    rows = rows_of(tmp_path, *words, code=1)
    found = {(row["kernel"], row["verdict"]): row["reason"] for row in rows if row["verdict"] != "passed"}
    expected = {
        ("scaled_add__half", "wrong"),
        ("clamp_scale__cpp", "unsupported"),
    }  # the second has a kernel for CPUs only
    assert set(found) == expected, json.dumps([[*key, why] for key, why in found.items()], indent=1)
    timed = [row for row in rows if row["phase"] == "performance" and row["verdict"] == "passed"]
    assert timed
    assert all(row["timed"] == "device" for row in timed)


def test_inputs_on_the_cpu_are_timed_as_there(tmp_path):
    folder = tmp_path / "ops" / "twice"
    folder.mkdir(parents=True)
    (folder / "gen_input.py").write_text(
        "import torch\nfrom opforge import Test\n"
        "def get_correctness_tests():\n    return [Test(lambda: torch.randn(3, device='cpu'))]\n"
        "def get_performance_tests():\n    return [Test(lambda: torch.randn(9999, device='cpu'))]\n"
    )
    (folder / "twice_reference.py").write_text("def twice_reference(x):\n    return x * 2\n")
    (folder / "twice_sum.py").write_text("def twice_kernel_impl(x):\n    return x + x\n")
    words = ("--suite", "custom_ops", "--backend", "custom_ops", "--custom-ops-root", str(tmp_path / "ops"))
    rows = rows_of(tmp_path, *words, code=0)
    (row,) = [row for row in rows if row["phase"] == "performance"]
    assert row["timed"] == "call"


@pytest.mark.skipif(find_spec("flag_gems") is None, reason="flag_gems is not installed")
def test_flag_gems_runs_in_a_confined_worker(tmp_path):
    rows = rows_of(tmp_path, "--suite", "smoke", "--backend", "flag_gems", code=1)
    assert {row["verdict"] for row in rows} <= {"passed", "wrong"}, rows
    assert any("NaN" in row["reason"] for row in rows)  # its relu makes a number of it
