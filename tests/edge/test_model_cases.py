"""Results of a program are compared with eager PyTorch element by element, by the judge's bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opforge.edge.check import FinishedRun, FolderQuestion
from opforge.edge.export import parse_target
from opforge.edge.model_cases import RunComparer, _planned_run, load_groups

MODEL = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3{more}


def model():
    return Model()


def inputs():
    return (torch.tensor([2000.0, 7.25, -3.7], dtype=torch.{dtype}),)
"""


def verdict(tmp_path: Path, dtype: str, steps: int, *, more: str = "", calls: int = 1) -> str:
    """Return the reason why a result is wrong that has one element some rounding steps too large."""
    (tmp_path / "model.py").write_text(MODEL.format(dtype=dtype, more=more))
    question = FolderQuestion(None, (), parse_target(str(tmp_path / "model.py")), tmp_path)
    _loaded, (group,) = load_groups(question)
    planned = _planned_run(group, group.example, tmp_path / "run", (0, 0))
    results = load_file(tmp_path / "run" / "expected.safetensors")
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[results["0"].element_size()]
    results["0"].view(words)[1] += steps
    save_file(results, tmp_path / "run" / "results.safetensors")
    return RunComparer(question).compare(FinishedRun(planned, calls)).reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_element_15_rounding_steps_off_is_wrong_though_another_is_large(tmp_path, dtype):
    reason = verdict(tmp_path, dtype, 15)
    assert reason.startswith("result 0: 1 of 3 elements: error ")
    if dtype == "bfloat16":
        assert reason.endswith("worst at [1]: got 23.625, eager PyTorch has 21.75")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_an_element_one_rounding_step_off_is_right(tmp_path, dtype):
    assert verdict(tmp_path, dtype, 1) == ""


def test_in_a_program_of_several_operators_a_sum_that_cancels_may_be_off_by_steps_of_its_terms(tmp_path):
    cancels = " - 21.625"  # 21.75 - 21.625 is 0.125: a step of the product is 128 steps of the difference
    assert "error" in verdict(tmp_path, "bfloat16", 128, more=cancels)
    (tmp_path / "several").mkdir()
    assert verdict(tmp_path / "several", "bfloat16", 128, more=cancels, calls=2) == ""
