"""Launch plans in files, on a GPU: a fresh process replays its first call, also while a graph is captured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import opforge
from opforge.package.pack import pack
from opforge.runtime.plan_files import PlanFile, read_plan_file, write_plan_file
from tests.conftest import NOT_PROOFS
from tests.package.packages import environment, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is missing; it runs on the GPU host"),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "triton_kernels"
FRESH = """
import importlib, json, sys
import torch
module, captured, *directory = sys.argv[1:]
backend = importlib.import_module(module)
made = backend.enable(*directory, device="cuda", policy="all", ops=["gelu.default", "native_layer_norm.default"])
weight = torch.ones(256, device="cuda", dtype=torch.float16)
work = lambda x: torch.native_layer_norm(torch.nn.functional.gelu(x), [256], weight, weight, 1e-5)[0]
x = torch.linspace(-3, 3, 64 * 256, device="cuda", dtype=torch.float16).view(64, 256)
if captured == "captured":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(x)
    graph.replay()
else:
    result = work(x)
counters = {op: (c["served"], c.get("replayed"), c.get("plans not loaded")) for op, c in made.counters().items()}
print(json.dumps([result.double().sum().item(), counters, "triton" in sys.modules]))
"""
OPS = ["gelu.default", "native_layer_norm.default"]


@pytest.fixture
def directory(tmp_path):
    """Return a directory of kernels with saved plans, and the result of the calls in FRESH."""
    root = tmp_path / "kernels"
    for op in ("gelu", "native_layer_norm"):
        shutil.copytree(EXAMPLES / op, root / op, ignore=NOT_PROOFS)
    x = torch.linspace(-3, 3, 64 * 256, device="cuda", dtype=torch.float16).view(64, 256)
    with opforge.enabled(root, device="cuda", policy="all", ops=OPS, learn="request") as made:
        weight = torch.ones(256, device="cuda", dtype=torch.float16)
        result = torch.native_layer_norm(functional.gelu(x), [256], weight, weight, 1e-5)[0]
        assert made.save_plans() == dict.fromkeys(OPS, 1)
    return root, result.double().sum().item()


def fresh(captured, root):
    done = subprocess.run(
        [sys.executable, "-c", FRESH, "opforge", captured, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("captured", ["captured", "plain"])
def test_a_fresh_process_replays_its_first_calls(directory, captured):
    root, expected = directory
    assert fresh(captured, root) == [expected, {op: [1, 1, None] for op in OPS}, False]


def test_an_installed_package_replays_its_first_calls(directory, tmp_path):
    root, expected = directory
    python = environment(tmp_path / "venv", pack(root, "my_plans", tmp_path / "dist").wheel)
    printed = run(python, "-c", FRESH, "my_plans", "plain", cwd=tmp_path)
    assert json.loads(printed) == [expected, {op: [1, 1, None] for op in OPS}, False]


def test_plans_for_another_architecture_are_made_again(directory):
    root, expected = directory
    path = root / "gelu" / "gelu_implementation_1.plans.json"
    wire = read_plan_file(path).wire()
    wire["origin"]["architecture"] = "sm_80"
    write_plan_file(path, PlanFile.from_wire(wire), {})
    result, counters, imported = fresh("plain", root)
    assert (result, imported) == (expected, True)
    (words,) = counters["gelu.default"][2]
    assert words.startswith("saved plans are not used: they were made for architecture sm_80, and this is sm_")
    assert counters["native_layer_norm.default"] == [1, 1, None]
    x = torch.linspace(-3, 3, 64 * 256, device="cuda", dtype=torch.float16).view(64, 256)
    with opforge.enabled(root, device="cuda", policy="all", ops=["gelu"], learn="request") as made:
        functional.gelu(x)
        made.learn()
        functional.gelu(x)
        assert made.counters()["gelu.default"]["replayed"] == 1


def test_a_compiled_kernel_with_much_shared_memory_is_loaded(tmp_path):
    """More than 48 KiB must be asked for."""
    root = tmp_path / "kernels"
    shutil.copytree(EXAMPLES / "mm", root / "mm", ignore=NOT_PROOFS)
    x = torch.ones(2048, 2048, device="cuda", dtype=torch.float16)
    program = (
        "import sys, torch, opforge\n"
        "made = opforge.enable(sys.argv[1], device='cuda', policy='all', ops=['mm.default'])\n"
        "x = torch.ones(2048, 2048, device='cuda', dtype=torch.float16)\n"
        "print(int(torch.mm(x, x)[0, 0]), made.counters()['mm.default'].get('replayed'))\n"
    )
    with opforge.enabled(root, device="cuda", policy="all", ops=["mm.default"], learn="request") as made:
        torch.mm(x, x)
        assert made.save_plans() == {"mm.default": 1}
    (saved,) = read_plan_file(root / "mm" / "mm_implementation_1.plans.json").operators["mm.default"].plans
    assert max(step["shared"] for step in saved.plan["steps"]) > 48 << 10
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=False)
    assert done.stdout == "2048 1\n", done.stderr
