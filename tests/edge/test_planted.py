"""Errors of a few rounding steps in the examples: `edge check` sees them where `opforge run` does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opforge.edge import check
from opforge.edge.check import FinishedRun, FinishedRuns, compare_results
from opforge.edge.child import ask
from opforge.edge.init import make_folder
from tests.command import opforge
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples" / "edge"
STEPS = (2, 4, 16)
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
TESTS = """
import torch

from opforge import Test


def get_correctness_tests():
    return [{tests}]


def get_performance_tests():
    return []
"""
PLANTED = """
import torch

from {op}_reference import {op}_reference


def {op}_kernel_impl(*args, **kwargs):
    given = {op}_reference(*args, **kwargs)
    return tuple(map(planted, given)) if isinstance(given, tuple) else planted(given)


def planted(result):
    words = {{torch.float32: torch.int32, torch.bfloat16: torch.int16}}.get(result.dtype)
    if words is None or not result.numel():
        return result
    flat = result.contiguous().reshape(-1).clone()
    finite = torch.where(flat.isfinite(), flat.abs(), -1)
    flat.view(words)[finite.argmax()] += {steps} if finite.max() > 0 else 0
    return flat.reshape(result.shape)
"""


def plant(result: torch.Tensor, steps: int) -> None:
    """Make the largest element larger by some rounding steps."""
    if result.dtype in WORDS and result.numel():
        result.view(WORDS[result.dtype]).view(-1)[result.abs().view(-1).argmax()] += steps


@pytest.fixture(params=["mul4", "rich", "mul3"])
def finished(request, tmp_path, monkeypatch) -> tuple[Path, FinishedRuns]:
    """Return an example's folder and its runs, which are right."""
    folder: Path = tmp_path / request.param
    if (EXAMPLES / request.param).is_dir():
        shutil.copytree(EXAMPLES / request.param, folder, ignore=shutil.ignore_patterns("build"))
    else:
        make_folder(folder, "my_ops", [request.param])
    questions: list[Any] = []
    monkeypatch.setattr(
        check, "ask", lambda step, question, **rest: questions.append(question) or ask(step, question, **rest)
    )
    report = check.check(folder)
    assert report.exit_code == 0, report
    return folder, next(question for question in questions if isinstance(question, FinishedRuns))


def seen_by_edge(finished: FinishedRuns, steps: int) -> Iterator[tuple[FinishedRun, str]]:
    """Yield the runs with float results, and why they are wrong with an error planted in all their results."""
    runs = []
    for run in finished.runs:
        results = load_file(run.planned.folder / "expected.safetensors")
        if any(result.dtype in WORDS for result in results.values()):
            for result in results.values():
                plant(result, steps)
            save_file(results, run.planned.folder / "results.safetensors")
            runs.append(run)
    answers = ask(compare_results, FinishedRuns(finished.folder, tuple(runs)), label="comparing")
    yield from zip(runs, (answer.reason for answer in answers.runs), strict=True)


def references(folder: Path) -> dict[str, str]:
    """Return the source of each operator's reference in Python."""
    if folder.name != "rich":
        factor = folder.name[-1]
        return {folder.name: f"def {folder.name}_reference(x):\n    return x * {factor}\n"}
    text = (folder / "ops.py").read_text().replace("from opforge.edge.define import define\n", "")
    functions = text[: text.index("\ndefine(")]
    return {op: functions.replace(f"def {op}(", f"def {op}_reference(") for op in INPUTS if f"def {op}(" in text}


INPUTS = {
    "mul4": "Test(lambda: torch.randn(3, 4))",
    "mul3": "Test(lambda: torch.randn(7, 5)), Test(lambda: torch.randn(7, 5).bfloat16())",
    "affine": "Test(lambda: torch.randn(4, 6), 0.5, lambda: torch.randn(4, 6), 'relu'), Test(lambda: torch.randn(4, 6), 3)",
    "weighted_sum": "Test(lambda: [torch.randn(4, 6) for _ in range(3)], [2, -1, 3])",
    "row_range": "Test(lambda: torch.randn(4, 6)), Test(lambda: torch.randn(4, 6), True)",
}
"""Cases of `opforge run`, like those of the examples."""


def seen_by_run(folder: Path, root: Path) -> dict[tuple[str, int], str]:
    """Return the verdict of `opforge run` by operator and number of steps."""
    for op, source in references(folder).items():
        (root / op).mkdir(parents=True)
        (root / op / f"{op}_reference.py").write_text(source)
        (root / op / "gen_input.py").write_text(TESTS.format(tests=INPUTS[op]))
        for steps in STEPS:
            (root / op / f"{op}_plus{steps}.py").write_text(PLANTED.format(op=op, steps=steps))
    words = ("--suite", "custom_ops", "--backend", "custom_ops", "--custom-ops-root", str(root))
    done = opforge("run", *words, "--out", str(root / "run"), "--workers", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts: dict[tuple[str, int], str] = {}
    for line in (root / "run" / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        op, _, steps = row["kernel"].partition("__plus")
        assert row["verdict"] in ("passed", "wrong"), row["reason"]
        verdicts[op, int(steps)] = max(verdicts.get((op, int(steps)), ""), row["verdict"])
    return verdicts


def test_what_a_run_sees_a_check_sees_too(finished, tmp_path):
    folder, runs = finished
    judged = seen_by_run(folder, tmp_path / "ops")
    for steps in STEPS:
        reasons = [reason for _run, reason in seen_by_edge(runs, steps)]
        for op in references(folder):
            mark = f"::{op}(" if folder.name == "rich" else "result"  # in a model of several, its calls by themselves
            seen = any(mark in reason for reason in reasons)
            assert seen == (judged[op, steps] == "wrong"), f"{op}, {steps} steps: a run says {judged[op, steps]}"
