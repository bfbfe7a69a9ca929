"""`opforge model`: a small transformer with kernels in place, right ones and each kind of wrong one, in the real sandbox."""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

from opforge.models.judge import ModelConfig, judge_model
from opforge.runs.config import RunConfig
from tests.command import opforge, opforge_process
from tests.conftest import ROOT

TRANSFORMER = ROOT / "examples" / "models" / "small_transformer.py"
KERNELS = ROOT / "examples" / "model_kernels"
WRONG_BACKWARD = """
import torch
def gelu_backward_kernel_impl(grad_output, self, *, approximate="none"):
    below = 0.5 * (1 + torch.erf(self * 0.5**0.5))
    return grad_output * (below + self * torch.exp(-0.5 * self * self) * 0.39)
"""
WRONG_FOR_ONE_SHAPE = """
def addmm_kernel_impl(self, mat1, mat2, *, beta=1, alpha=1):
    found = (mat1.double().unsqueeze(-1) * mat2.double()).sum(1).float() + self
    return found * 1.001 if mat1.shape[1] == 128 else found
"""
RAISES = "def _softmax_kernel_impl(self, dim, half_to_float):\n    raise ValueError('a bug')\n"
CRASHES = "import ctypes\ndef tanh_kernel_impl(self):\n    ctypes.string_at(0)\n"
DECLINES = "def tanh_kernel_impl(self):\n    raise NotImplementedError('not on Mondays')\n"
OF_ANOTHER_DTYPE = "import torch\ndef tanh_kernel_impl(self):\n    return torch.tanh(self.double())\n"
DIES_WHILE_LOADING = "import os\nos._exit(3)\n"
RAISES_WHILE_LOADING = "raise RuntimeError('no')\n"
LISTENS = "import socket\ndef tanh_kernel_impl(self):\n    socket.socket(socket.AF_INET)\n"


@pytest.fixture
def judge(tmp_path):
    """Return a function that judges the transformer with the example's right kernels and some others."""

    def judged(others, *, without=("gelu",), model=TRANSFORMER, **fields):
        root = tmp_path / "kernels"
        shutil.copytree(
            KERNELS, root, ignore=lambda _path, names: [n for n in names if n in without or ".proof.json" in n]
        )
        for op, source in others.items():
            (root / op).mkdir(exist_ok=True)
            (root / op / f"{op}_implementation_1.py").write_text(source)
        limits = {"timeout_s": 20.0, "ops_directory": str(root)}
        return judge_model(ModelConfig(str(model), RunConfig("model", "directory", **limits), **fields))

    return judged


def guilty(report):
    return [row["kernel"].removesuffix("_implementation_1") for row in report["blame"]["guilty"]]


@pytest.mark.slow
def test_the_one_inaccurate_kernel_among_ten_right_ones_is_named(tmp_path):
    assert len(list(KERNELS.iterdir())) == 11
    done = opforge("model", str(TRANSFORMER), "--ops-directory", str(KERNELS), "--train", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{TRANSFORMER} with directory on cpu (f32, training): wrong"
    (blamed,) = [line for line in lines if line.startswith("caused by")]
    assert blamed.split()[2] == "gelu_implementation_1,"
    case = "gelu.default ((T([2, 12, 128], f32),), {})"
    assert f"  first wrong call: 1 of 2 (forward): {case}" in lines
    command = next(line for line in lines if line.startswith("    opforge time"))
    again = opforge(*shlex.split(command)[1:])  # what it says to run shows the fault by itself
    assert again.returncode == 1, again.stderr
    assert "wrong, so it was not timed" in again.stdout
    assert list(tmp_path.iterdir()) == []


def test_right_kernels_pass_and_are_timed(judge):
    report = judge({}, train=True)
    assert (report["verdict"], report["reason"], report["dtype"]) == ("passed", "", "f32")
    assert report["notes"] == []
    names = [row["name"] for row in report["results"]]
    assert names[:3] == ["output['logits']", "output['pooled']", "loss"]
    assert len(names) == 65  # of the 31 parameters the gradients, and what they are after a step
    assert all(row["right"] and row["aten_error"] > 0 for row in report["results"])
    assert report["time"]["low"] <= report["time"]["speedup"] <= report["time"]["high"]
    kernels = {row["kernel"].removesuffix("_implementation_1"): row for row in report["kernels"]}
    assert len(kernels) == 10
    assert kernels["add"]["ops"] == {"add.Tensor": 6 + 31, "add_.Tensor": 5 + 31}  # and those of the optimizer's step
    assert kernels["bmm"]["calls"] == 12  # 4 forward, 8 backward
    for row in kernels.values():
        assert row["calls"] > 0
        assert row["kernel_us_range"][0] <= row["kernel_us"] <= row["kernel_us_range"][1]
        assert row["aten_us_range"][0] <= row["aten_us"] <= row["aten_us_range"][1]


@pytest.mark.slow
def test_kernels_that_are_not_hit_or_fall_back_are_counted_with_reasons(judge):
    report = judge({"tanh": DECLINES}, dtype="bf16", without=("gelu", "addmm"))
    assert (report["verdict"], report["dtype"]) == ("passed", "bf16")
    kernels = {row["kernel"].removesuffix("_implementation_1"): row for row in report["kernels"]}
    assert kernels["tanh"]["fallback_reasons"] == {"NotImplementedError: not on Mondays": 1}
    assert kernels["mul"]["fallback_reasons"] == {"NotImplementedError: only float32 on the CPU": 2}
    assert kernels["native_layer_norm_backward"]["calls"] == 0


@pytest.mark.slow
def test_a_kernel_that_is_wrong_only_in_backward(judge):
    report = judge({"gelu_backward": WRONG_BACKWARD}, train=True)
    assert report["verdict"] == "wrong"
    wrong = {row["name"] for row in report["results"] if not row["right"]}
    assert "output['logits']" not in wrong
    assert "gradient of blocks.1.wide.bias" in wrong
    (row,) = report["blame"]["guilty"]
    assert row["kernel"] == "gelu_backward_implementation_1"
    assert (row["first"]["op"], row["first"]["phase"]) == ("gelu_backward.default", "backward")


@pytest.mark.slow
def test_a_kernel_that_is_wrong_only_for_one_shape(judge):
    report = judge({"addmm": WRONG_FOR_ONE_SHAPE})
    (row,) = report["blame"]["guilty"]
    assert row["kernel"] == "addmm_implementation_1"
    first = row["first"]
    assert (first["number"], row["calls"], row["looked_at"]) == (3, 9, 4)
    assert first["case"] == "((T([32], f32), T([24, 128], f32), T([128, 32], f32, stride=(1, 128))), {})"
    assert first["kernel_error"] > first["bound"] > 0
    assert first["also_with_seeded_contents"]


@pytest.mark.slow
def test_two_guilty_kernels_of_different_kinds_are_both_found(judge):
    report = judge({"addmm": WRONG_FOR_ONE_SHAPE, "_softmax": RAISES})
    assert report["verdict"] == "error"
    assert report["reason"] == "_softmax_implementation_1, for _softmax.default, raised ValueError: a bug"
    assert sorted(guilty(report)) == ["_softmax", "addmm"]
    verdicts = {row["kernel"]: (row["verdict"], row["first"]["verdict"]) for row in report["blame"]["guilty"]}
    assert verdicts == {
        "_softmax_implementation_1": ("error", "error"),
        "addmm_implementation_1": ("wrong", "wrong"),
    }


def test_a_kernel_that_crashes(judge):
    report = judge({"tanh": CRASHES})
    assert report["verdict"] == "crashed"
    assert report["reason"].startswith("in tanh_implementation_1: its process died of SIGSEGV")
    assert guilty(report) == ["tanh"]
    first = report["blame"]["guilty"][0]["first"]
    assert (first["op"], first["verdict"]) == ("tanh.default", "crashed")


def test_a_result_of_another_dtype_and_files_that_cannot_be_loaded(judge):
    others = {"tanh": OF_ANOTHER_DTYPE, "relu": DIES_WHILE_LOADING, "neg": RAISES_WHILE_LOADING}
    report = judge(others)
    assert "output['pooled']: dtype float64, ATen has float32" in report["reason"]
    assert guilty(report) == ["tanh"]
    assert report["blame"]["guilty"][0]["first"]["verdict"] == "contract"
    broken = {row["kernel"]: (row["verdict"], row["reason"]) for row in report["kernels"] if "verdict" in row}
    assert broken == {
        "neg_implementation_1": (
            "error",
            "cannot be loaded: neg_implementation_1.py raised while loading: RuntimeError: no (line 1)",
        ),
        "relu_implementation_1": ("crashed", "while loading: its process exited with status 3"),
    }


def test_a_kernel_that_reaches_out_is_named(judge):
    report = judge({"tanh": LISTENS})
    assert report["verdict"] == "cheated"
    assert "open a socket (AF_INET)" in report["reason"]
    assert guilty(report) == ["tanh"]


MODULE = """
import torch

from beside import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(WIDTH, WIDTH)
    def forward(self, *, x):
        return torch.relu(self.line(x))

def make():
    return Net(), {"x": torch.randn(3, 4)}

def broken():
    raise ValueError("not today")
"""
RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"


@pytest.fixture
def place(tmp_path, kernel_directory):
    kernel_directory({"relu": RELU})
    (tmp_path / "net.py").write_text(MODULE)
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    return tmp_path


@pytest.mark.slow
def test_a_function_of_a_module_and_json(place):
    done = opforge("model", "net:make", "--ops-directory", "kernels", "--format", "json", cwd=place)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["verdict"], report["device"]) == ("net:make", "passed", "cpu")
    assert [row["name"] for row in report["results"]] == ["output"]
    assert report["kernels"][0]["ops"] == {"relu.default": 1}


LIBRARY = """
import torch

class Net(torch.nn.Module):
    default_cfg = {"input_size": (3, 8, 8)}
    def __init__(self, width=4):
        super().__init__()
        self.line = torch.nn.Linear(8, width)
    def forward(self, x):
        return torch.relu(self.line(x))

def list_models():
    return ["tiny"]

def create_model(name, pretrained, img_size=8, **changes):
    return Net(**changes)
"""


@pytest.fixture
def library(place):
    """Return where a library of architectures lies that is called as a well-known one, and how large that is not."""
    (place / "library" / "timm").mkdir(parents=True)
    (place / "library" / "timm" / "__init__.py").write_text(LIBRARY)
    return {"cwd": place, "PYTHONPATH": f"{place / 'library'}:{ROOT / 'src'}"}


@pytest.mark.own_server
@pytest.mark.slow
def test_an_architecture_by_name_is_trained_for_a_step(library):
    words = ["--train", "--set", "width=6", "--batch", "2", "--ops-directory", "kernels", "--format", "json"]
    done = opforge_process("model", "timm:tiny", *words, **library)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["verdict"]) == ("timm:tiny", "passed")
    assert [row["name"] for row in report["results"]] == [
        "output",
        "loss",
        "gradient of line.weight",
        "gradient of line.bias",
        "line.weight after a step",
        "line.bias after a step",
    ]
    assert report["kernels"][0]["ops"] == {"relu.default": 1}


@pytest.mark.own_server
@pytest.mark.slow
def test_an_architecture_that_there_is_not_is_answered_with_the_nearest(library):
    done = opforge_process("model", "timm:tinny", "--ops-directory", "kernels", **library)
    assert done.returncode == 2
    assert "unknown architecture of timm 'tinny'; did you mean 'tiny'?" in done.stderr


@pytest.mark.slow
def test_a_kernel_that_is_wrong_in_the_optimizers_step_alone_is_named(judge, tmp_path):
    source = (
        TRANSFORMER.read_text()
        + "\ndef optimizer(parameters):\n    return torch.optim.AdamW(parameters, foreach=False)\n"
    )
    (tmp_path / "mine.py").write_text(source)
    wrong = "import torch\ndef addcdiv__kernel_impl(self, tensor1, tensor2, *, value=1):\n    return self.add_(tensor1 / tensor2 * value * 1.5)\n"
    report = judge(
        {"addcdiv_": wrong}, model=tmp_path / "mine.py", train=True, without=tuple(k.name for k in KERNELS.iterdir())
    )
    assert report["verdict"] == "wrong"
    assert guilty(report) == ["addcdiv_"]
    assert report["blame"]["guilty"][0]["first"]["phase"] == "optimizer"
    assert {row["name"].endswith("after a step") for row in report["results"] if not row["right"]} == {True}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["net:broken"],
            2,
            "net:broken cannot be run, even without kernels: net:broken raised ValueError: not today (line 17)",
        ),
        (["nowhere.py"], 2, "there is no file 'nowhere.py'; give a Python file that defines model() and inputs()"),
        (
            ["net:make", "--dtype", "i64"],
            2,
            "--dtype i64 is not supported for a model's weights; allowed: f32, f16",
        ),
        (["net:make", "--dtype", "f33"], 2, "unknown dtype 'f33'"),
        (
            ["net:make", "--layers", "2"],
            2,
            "require an architecture such as hf:BertModel, not 'net:make'",
        ),
        (["net:make", "--set", "x"], 2, "--set 'x' is not NAME=VALUE"),
        (["net:make", "--seed", "-1"], 2, "--seed -1 is out of range"),
        (["net:make", "--device", "gpu"], 2, "unknown device 'gpu'; allowed: cpu, cuda"),
        (["net:make", "--backend", "directori"], 2, "unknown backend 'directori'; did you mean 'directory'?"),
        (["net:make", "--backend", "aten"], 5, "backend 'aten' has no kernels to put in ATen's place"),
        (["net:make", "--ops", "mm"], 5, "backend 'directory' has no kernels for mm to put in ATen's place"),
        (["net:make", "--ops", "rellu"], 2, "unknown operator 'rellu'; did you mean 'relu'"),
        (["net:make", "--ops", ","], 2, "--ops is empty; leave it out to take all"),
        (["net:make", "--ops-directory", "nowhere"], 2, "there is no kernel directory"),
        (["net:make", "--format", "xml"], 2, "unknown format 'xml'; allowed: text, json"),
        (["net:make", "--ops-directory", "idle"], 5, "this model called no kernel, so nothing was judged"),
    ],
)
def test_bad_input(place, words, code, message):
    if "idle" in words:
        Path(place / "idle" / "neg").mkdir(parents=True)
        (place / "idle" / "neg" / "neg_implementation_1.py").write_text(
            "def neg_kernel_impl(self):\n    return 0 - self\n"
        )
    given = words if "--ops-directory" in words else [*words, "--ops-directory", "kernels"]
    done = opforge("model", *given, cwd=place)
    assert done.returncode == code, done.stderr + done.stdout
    assert message in " ".join(done.stderr.split())


def test_a_kernel_that_calls_what_it_replaces_is_cheated_as_in_a_run(judge):
    wraps = {"tanh": "import torch\ndef tanh_kernel_impl(self):\n    return torch.ops.aten.tanh.default(self)\n"}
    report = judge(wraps)
    assert report["verdict"] == "cheated"
    reason = "calls aten::tanh, the operator that it replaces (--allow-fallback permits it)"
    assert report["reason"] == f"tanh_implementation_1 {reason}"
    verdicts = {row["kernel"]: (row["verdict"], row["reason"]) for row in report["kernels"] if "verdict" in row}
    assert verdicts == {"tanh_implementation_1": ("cheated", reason)}
    assert "time" not in report


def test_nor_may_it_decline_its_first_call_or_die_where_it_is_watched(judge):
    declines_first = """
        import torch
        seen = []
        def gelu_kernel_impl(self, **options):
            seen.append(self)
            if len(seen) == 1:
                raise NotImplementedError("not yet")
            return torch.ops.aten.gelu.default(self, **options)
    """
    dies = """
        import os, sys, torch
        def tanh_kernel_impl(self):
            frame = sys._getframe()
            while frame := frame.f_back:
                if frame.f_code.co_filename.endswith("guest/worker.py"):
                    os._exit(3)
            return torch.ops.aten.tanh.default(self)
    """
    report = judge({"gelu": textwrap.dedent(declines_first), "tanh": textwrap.dedent(dies)})
    verdicts = {row["kernel"].partition("_")[0]: row["verdict"] for row in report["kernels"] if "verdict" in row}
    assert report["verdict"] in ("cheated", "crashed")
    assert verdicts == {"gelu": "cheated", "tanh": "crashed"}


@pytest.mark.slow
def test_and_it_may_when_that_is_allowed(place):
    (place / "kernels" / "relu" / "relu_implementation_1.py").write_text(
        "import torch\ndef relu_kernel_impl(self):\n    return torch.relu(self)\n"
    )
    words = ["model", "net:make", "--ops-directory", "kernels"]
    refused = opforge(*words, cwd=place)
    assert refused.returncode == 1
    assert "cheated relu_implementation_1: calls aten::relu, the operator that it replaces" in refused.stdout
    allowed = opforge(*words, "--allow-fallback", cwd=place)
    assert allowed.returncode == 0, allowed.stdout
