"""Operators registered in C++ ahead of time: what would end the process is an error before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor same(const Tensor& x) { return x; }
BLOCK(claimed_ops, m) { m.def("NAME(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(claimed_ops, CPU, m) { m.impl("NAME", TORCH_BOX(&same)); }
"""
SITUATIONS = """
import json, sys
import torch
from opforge.edge.build_definitions import load_sources
from opforge.errors import OpforgeError
claim = torch.library.Library("claimed_ops", "DEF")
answers = {}
for name in ("part", "part", "whole", "again", "empty", "nowhere"):
    try:
        answer = load_sources(f"{sys.argv[1]}/{name}")
    except OpforgeError as error:
        answer = str(error)
    answers.setdefault(name, []).append(answer)
x = torch.ones(3)
answers["called"] = torch.ops.claimed_ops.part_of_it(x) is not None
print(json.dumps(answers))
"""


def write(folder: Path, block: str, name: str) -> None:
    folder.mkdir()
    (folder / "op.cpp").write_text(SOURCE.replace("BLOCK", block).replace("NAME", name))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return what came of loading libraries beside a namespace that Python code has claimed, all in one process."""
    folder = tmp_path_factory.mktemp("ahead")
    write(folder / "part", "STABLE_TORCH_LIBRARY_FRAGMENT", "part_of_it")
    write(folder / "whole", "STABLE_TORCH_LIBRARY", "all_of_it")
    write(folder / "again", "STABLE_TORCH_LIBRARY_FRAGMENT", "part_of_it")
    (folder / "empty").mkdir()
    (folder / "empty" / "op.cpp").write_text("int nothing() { return 0; }\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SITUATIONS, str(folder)],
        capture_output=True, text=True, cwd=ROOT / "src", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_fragment_adds_to_a_namespace_that_python_has_claimed(answers):
    first, second = answers["part"]
    assert first == {"claimed_ops::part_of_it": "claimed_ops::part_of_it(Tensor x) -> Tensor"}
    assert second == {}  # it is there already
    assert answers["called"]


def test_a_library_that_claims_the_namespace_again_is_named(answers):
    (said,) = answers["whole"]
    assert said.startswith("namespace 'claimed_ops' is claimed twice: by ")
    assert "ahead0_whole.so" in said
    assert "loading both ends the process" in said
    assert "TORCH_LIBRARY_FRAGMENT(claimed_ops, m)" in said


def test_an_operator_that_is_there_already_is_named(answers):
    (said,) = answers["again"]
    assert said.startswith("operator claimed_ops::part_of_it is defined twice: in ")
    assert "again.so" in said


def test_sources_that_register_nothing_are_named(answers):
    (said,) = answers["empty"]
    assert "empty registers no operator; write a block STABLE_TORCH_LIBRARY_FRAGMENT" in said


def test_a_folder_without_sources_is_named(answers):
    (said,) = answers["nowhere"]
    assert "there is no source (.cpp" in said
