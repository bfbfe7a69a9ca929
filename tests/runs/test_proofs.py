"""What a run proves of a kernel, and that `enable` serves just that."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import opforge
from opforge.cases.case import id_of
from opforge.kernels import Kernel
from opforge.kernels.proofs import proof_of
from opforge.kernels.source import digest
from opforge.runs.proofs import not_slower, ranges, write_proofs
from opforge.runtime.serving import KernelWarning

RELU = """
import torch
def relu_kernel_impl(self):
    if self.dtype == torch.float64:
        return self  # wrong where there is something below zero
    return torch.where(self > 0, self, torch.where(self.isnan(), self, 0)).to(self.dtype)
"""


@pytest.fixture
def folder(tmp_path):
    file = tmp_path / "kernels" / "relu" / "relu_implementation_1.py"
    file.parent.mkdir(parents=True)
    file.write_text(RELU)
    return file


@pytest.fixture
def judge(folder, judge_tiny):
    """Return a function that judges the kernel on one case."""

    def judge(case):
        ended = judge_tiny(folder.parents[1], {"relu.default": [case]})
        shutil.rmtree(ended.store.path)

    return judge


MANIFEST = {"versions": {"torch": "2.13.0"}, "machine": {"name": "a CPU"}, "config": {"suite": "tiny"}}


def passed(case, verdict="passed", op="relu.default", **fields):
    """Return the row of a case; its id is made of what it asks."""
    return {
        "kernel": "k",
        "op": op,
        "case": case,
        "id": id_of(op, case, "", "returns", "correctness"),
        "verdict": verdict,
        **fields,
    }


def prove(file, *rows):
    """Write the proof of a kernel from rows of a run."""
    kernel = Kernel("k", "relu.default", (), str(file), (), digest(file))
    return write_proofs([kernel], rows, MANIFEST, ())


def proof(file):
    return json.loads(proof_of(file).read_text())


def test_sizes_speak_for_those_that_are_nearer_to_them_than_to_others():
    assert ranges([(100, True)]) == [[50, 200, True]]
    assert ranges([(100, True), (10_000, True)]) == [[50, 20_000, True]]
    assert ranges([(100, False), (10_000, True)]) == [[50, 1000, False], [1001, 20_000, True]]
    assert ranges([(100, True), (100, False)]) == [[50, 200, False]]
    assert ranges([]) == []


@pytest.mark.parametrize(
    ("device", "call", "good"),
    [(1.2, 1.1, True), (1.2, 0.6, False), (0.9, 1.1, False), (1.0, 1.0, True), (1.2, None, True)],
)
def test_on_a_gpu_a_kernel_that_is_launched_slowly_is_slower(device, call, good):
    row = {"speedup_high": device, "device": {"high": device}, **({} if call is None else {"call": {"high": call}})}
    assert not_slower(row) is good


def test_a_run_proves_what_passed_and_enable_serves_it(folder, judge):
    judge("((T([3, 4], f32),), {})")
    found = proof(folder)
    assert found["operators"]["relu.default"]["float32"]["numel"][1] == 12
    assert found["operators"]["relu.default"]["float32"]["rank"][1] == 2
    assert "contiguous" in found["operators"]["relu.default"]["float32"]["layouts"]
    with opforge.enabled(folder.parents[1], device="cpu", policy="right") as made:
        torch.relu(torch.ones(3, 4))
        torch.relu(torch.ones(3, 4, dtype=torch.float64))
        torch.relu(torch.ones(3, 40))
        assert made.counters()["relu.default"]["served"] == 1
        assert made.counters()["relu.default"]["aten"] == {"dtypes not proven": 1, "size not proven": 1}
    nowhere = pytest.warns(KernelWarning, match="no kernel is put in place")
    with nowhere, opforge.enabled(folder.parents[1], device="cpu") as made:
        assert made.counters() == {}  # and not asked in vain, call by call
        assert made.refused["relu.default"].startswith("relu_implementation_1 is at no size both timed and not slower")


def test_a_second_run_widens_a_proof_and_a_failure_takes_its_dtypes_away(folder, judge):
    judge("((T([3, 4], f32),), {})")
    judge("((T([50], f32),), {})")
    assert proof(folder)["operators"]["relu.default"]["float32"]["numel"][1] == 50
    judge("((T([50], f64),), {})")
    assert list(proof(folder)["operators"]["relu.default"]) == ["float32"]
    folder.write_text(RELU.replace("self > 0, self", "self > 0, 2 * self"))
    judge("((T([50], f32),), {})")
    assert not proof_of(folder).exists()


@pytest.mark.parametrize(
    "before",
    [
        "[" * 200_000,
        {"operators": None},
        {"operators": {"relu.default": {"float32": {"rank": 5}}}},
        {"suites": 3},
        {"opforge_proof": 1},
    ],
    ids=lambda b: str(b)[:40],
)
def test_a_proof_that_is_broken_or_of_another_format_is_replaced(folder, before):
    prove(folder, passed("((T([3, 4], f32),), {})"))
    if isinstance(before, dict):
        before = json.dumps({**proof(folder), **before})
    proof_of(folder).write_text(before)
    prove(folder, passed("((T([50], f32),), {})"))
    assert proof(folder)["operators"]["relu.default"]["float32"]["numel"] == [50, 50]
