"""Kernels judged behind their native slots: the judge calls the ATen operator, as a model does."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

from opforge.errors import OpforgeError
from opforge.kernels.proof import read_proof
from opforge.runs import RunConfig, run
from opforge.runs.compare.compatible import other_differences
from opforge.runs.execute import judge_pool
from tests.command import opforge
from tests.conftest import ROOT, UNARY, verdicts
from tests.exploits.judging import Court
from tests.exploits.table import CPU
from tests.exploits.test_exploits import check
from tests.native import RELU, write
from tests.runtime import standin

OUT_FORM = ["((T([4], f32),), {'out': T([4], f32)})"]
RIGHT = "return torch.where(self > 0, self, torch.where(self.isnan(), self, torch.zeros_like(self)))"
NO_GPU = "launch plans are for kernels on a GPU"


def kernels(tmp_path, body, op="relu", head=""):
    source = f"import torch\n{head}\ndef {op}_kernel_impl(self):\n" + "".join(
        f"    {line}\n" for line in body.split("\n")
    )
    write(tmp_path / "kernels" / op, source, f"{op}_implementation_1.py")
    return tmp_path / "kernels"


def ways(ended):
    return {(row.op, row.ran, row.not_replayed) for row in ended.store.rows()}


def test_a_cpp_kernel_is_called_by_the_slot_and_the_run_and_its_proof_say_so(tmp_path, judge_tiny):
    source = write(tmp_path / "kernels" / "relu", RELU, "relu_implementation_1.cpp")
    ended = judge_tiny(tmp_path / "kernels", {"relu.default": UNARY, "relu.out": OUT_FORM}, runtime="native")
    assert verdicts(ended) == {"relu.default": {("passed", "")}, "relu.out": {("passed", "")}}
    assert ways(ended) == {("relu.default", "C++", ""), ("relu.out", "Python", NO_GPU)}
    counts = {"C++": len(UNARY), "Python": 1}
    assert ended.summary.scores()["ran"] == counts
    assert ended.manifest.config["runtime"] == "native"
    shown = opforge("report", str(ended.store.path)).stdout
    assert f"native; cases by the way they ran: {len(UNARY)} C++, 1 Python" in shown
    assert f"through Python, 1×: {NO_GPU}" in shown
    proof = read_proof(source, ended.manifest.plan.kernels[0].digest)
    (row,) = proof.operators["relu.default"].values()
    assert row.native["C++"]["cases"] == len(UNARY)
    (row,) = proof.operators["relu.out"].values()
    assert row.native == {"Python": {"cases": 1, "numel": [4, 4]}}


def test_a_python_kernel_is_called_behind_its_slot_in_all_forms(tmp_path, judge_tiny):
    cases = {"relu.default": UNARY, "relu.out": OUT_FORM, "relu_.default": UNARY[:1]}
    ended = judge_tiny(kernels(tmp_path, RIGHT), cases, runtime="native")
    assert verdicts(ended) == {op: {("passed", "")} for op in cases}
    assert ways(ended) == {(op, "Python", NO_GPU) for op in cases}


@pytest.mark.slow
@pytest.mark.parametrize("source", [RELU, None], ids=["C++", "Python"])
def test_timed_calls_go_through_the_slot(source, tmp_path, judge_tiny):
    folder = kernels(tmp_path, RIGHT) if source is None else tmp_path / "kernels"
    if source is not None:
        write(folder / "relu", source, "relu_implementation_1.cpp")
    ended = judge_tiny(folder, {"relu.default": ["((T([64, 64], f32),), {})"]}, runtime="native", performance=True)
    assert verdicts(ended) == {"relu.default": {("passed", "")}}
    assert {row.ran for row in ended.store.rows()} == {"Python" if source is None else "C++"}
    assert any(row.headline is not None for row in ended.store.rows())


def test_the_python_runtime_says_nothing_of_ways_and_its_proof_neither(tmp_path, judge_tiny):
    folder = kernels(tmp_path, RIGHT)
    ended = judge_tiny(folder, {"relu.default": UNARY})
    assert ways(ended) == {("relu.default", "", "")}
    assert "ran" not in ended.summary.scores()
    (path,) = folder.rglob("*.proof.json")
    assert "native" not in path.read_text()


RAISES = "raise RuntimeError('let ATen answer')"
TRICKS = {
    "raises": (RAISES, "", "error", "RuntimeError: let ATen answer"),
    "declines": ("raise NotImplementedError('let ATen answer')", "", "unsupported", "let ATen answer"),
    "raises later": (
        f"COUNT.append(0)\nif len(COUNT) > 1:\n    {RAISES}\n{RIGHT}",
        "COUNT = []",
        "error|contract",
        "let ATen answer",
    ),
    "takes its kernel out of the slot": (
        f"for found in gc.get_objects():\n    if type(found).__name__ == '_JudgedSlot':\n        found.kernels = ()\n{RIGHT}",
        "import gc",
        "cheated|error",
        "calls aten::relu, the operator that it replaces|did not reach the kernel",
    ),
    "switches the slot off": (
        f"for found in gc.get_objects():\n    if type(found).__name__ == '_JudgedSlot':\n        found.switch_off()\n{RIGHT}",
        "import gc",
        "cheated|error",
        "calls aten::relu, the operator that it replaces|did not reach the kernel",
    ),
    "calls the operator": ("return torch.relu(self)", "", "cheated", "calls aten::relu, the operator that it replaces"),
    "calls what the slot has for ATen": (
        "for found in gc.get_objects():\n    if type(found).__name__ == '_JudgedSlot':\n        return found.aten_kernel(self)",
        "import gc",
        "error",
        "ATen does not answer for a kernel that is judged",
    ),
    "calls ATen's kernel of this key": (
        "return torch.library.get_kernel('aten::relu', 'CPU').call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), self)",
        "",
        "cheated",
        "calls aten::relu, the operator that it replaces",
    ),
    "replaces the slot's method": (
        f"from opforge.sandbox.guest.native_runtime import _JudgedSlot\n_JudgedSlot._call = LET\n{RAISES}",
        "def LET(slot, args, kwargs, *_more):\n    return args[0].clamp(min=0)",
        "cheated|contract|error",
        "tampered|let ATen answer",
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_aten_does_not_answer_for_a_kernel(trick, tmp_path, judge_tiny):
    body, head, verdict, reason = TRICKS[trick]
    ended = judge_tiny(kernels(tmp_path, body, head=head), {"relu.default": UNARY[:1]}, runtime="native")
    ((found, why),) = verdicts(ended)["relu.default"]
    assert found in verdict.split("|"), why
    assert re.search(reason, why)
    proof = tmp_path / "kernels" / "relu" / "relu_implementation_1.proof.json"
    assert not proof.is_file() or not json.loads(proof.read_text())["operators"]


def test_aten_does_not_answer_timed_calls(tmp_path, judge_tiny):
    """A kernel that is right until it is timed, and then leaves the slot to ATen."""
    timed = "any(f.f_code.co_qualname == 'HostTimedCalls.run' for f in FRAMES())"
    head = (
        "import gc, sys\ndef FRAMES():\n    frame = sys._getframe()\n    while frame is not None:\n"
        "        yield frame\n        frame = frame.f_back\n"
    )
    leave = "    for found in gc.get_objects():\n        if type(found).__name__ == '_JudgedSlot':\n            found.kernels = ()"
    folder = kernels(tmp_path, f"if {timed}:\n{leave}\n{RIGHT}", head=head)
    ended = judge_tiny(folder, {"relu.default": UNARY[:1]}, runtime="native", performance=True)
    (timed,) = (row for row in ended.store.rows() if row.phase == "performance")
    assert timed.verdict in ("cheated", "error"), timed.reason


def stand_in(tmp_path, monkeypatch):
    """Give workers a stand-in for a GPU's driver, so that kernels on the CPU have launch plans."""
    monkeypatch.setenv("OPFORGE_TEST_STANDIN", str(standin.build(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setitem(judge_pool.ROLES, "worker", "tests.runs.standin_worker:serve")


@pytest.mark.own_server
@pytest.mark.slow
def test_what_is_judged_is_the_replay_of_a_launch_plan(tmp_path, judge_tiny, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    folder = kernels(tmp_path, RIGHT)
    source = write(folder / "neg", standin.KERNELS["neg"], "neg_implementation_1.py")
    ended = judge_tiny(
        folder, {"neg.default": UNARY[:1], "neg.out": OUT_FORM, "relu.default": UNARY}, runtime="native", timeout_s=60
    )
    assert verdicts(ended) == {op: {("passed", "")} for op in ("neg.default", "neg.out", "relu.default")}
    found = {op: (ran, reason) for op, ran, reason in ways(ended)}
    assert found["neg.default"] == ("replayed", "")
    assert found["relu.default"] == ("Python", "it calls aten::gt.Scalar, which may launch a kernel of its own")
    digest = next(kernel.digest for kernel in ended.manifest.plan.kernels if kernel.ops[0] == "neg.default")
    (row,) = read_proof(source, digest).operators["neg.default"].values()
    assert row.native == {"replayed": {"cases": 1, "numel": [12, 12]}}


@pytest.mark.own_server
@pytest.mark.slow
def test_the_kernel_in_python_is_judged_beside_its_replay(tmp_path, judge_tiny, monkeypatch):
    """A call runs through Python until there is a plan. This kernel is right only while its plan is made."""
    stand_in(tmp_path, monkeypatch)
    made = "-1.0 if any(f.f_code.co_name == '_learn_one' for f, _ in traceback.walk_stack(None)) else -2.0"
    source = standin.KERNELS["neg"].replace("-1.0", made).replace("import torch", "import torch, traceback", 1)
    write(tmp_path / "kernels" / "neg", source, "neg_implementation_1.py")
    ended = judge_tiny(tmp_path / "kernels", {"neg.default": UNARY[:1]}, runtime="native", timeout_s=60)
    ((verdict, reason),) = verdicts(ended)["neg.default"]
    assert verdict == "contract"
    assert reason.startswith("another answer to the same inputs the second time")
    assert ways(ended) == {("neg.default", "replayed", "")}


EXPLOITS = [
    e
    for e in CPU
    if e.kernel
    in (
        "bypass/direct", "bypass/original_kernel", "bypass/redispatch", "bypass/fallback",
        "replay/by_id", "semantics/mutates_input", "corners/default_dtype", "corners/shared_scratch",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def native_court(tmp_path_factory):
    return Court(EXPLOITS, tmp_path_factory.mktemp("native"), runtime="native")


@pytest.mark.parametrize("exploit", EXPLOITS, ids=lambda e: e.kernel)
def test_an_exploit_is_seen_behind_a_slot_too(exploit, native_court):
    check(exploit, native_court)


def test_an_operator_that_takes_no_slot_is_judged_by_its_function_and_the_row_says_why(tmp_path, judge_tiny):
    folder = kernels(tmp_path, "return self.reshape(-1)", op="ravel")
    ended = judge_tiny(folder, {"ravel.default": ["((T([3, 4], f32),), {})"]}, runtime="native")
    ((op, ran, reason),) = ways(ended)
    assert (op, ran) == ("ravel.default", "Python")
    assert "made of other operators (CompositeImplicitAutograd)" in reason


def test_a_run_is_resumed_in_its_own_runtime(tmp_path, judge_tiny):
    ended = judge_tiny(kernels(tmp_path, RIGHT), {"relu.default": UNARY[:1]}, runtime="native")
    refused = opforge("run", "--resume", str(ended.store.path), "--runtime", "python")
    assert refused.returncode == 2
    assert "--runtime cannot be combined with --resume" in refused.stderr
    config = {name: value for name, value in ended.manifest.config.items() if name != "runtime"}
    assert RunConfig.from_json(config).runtime == "python"  # a run of an older version
    older = replace(ended.manifest, config=config)
    assert list(other_differences(older, ended.manifest)) == ["setting runtime was python, and native"]


def test_an_unknown_runtime_is_refused(tmp_path):
    with pytest.raises(OpforgeError, match="unknown --runtime 'cpp'; allowed: python, native"):
        run(RunConfig("smoke", "aten", runtime="cpp"), tmp_path / "run")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        pytest.param(
            {"CXX": "/no/compiler"},
            "CXX names '/no/compiler', which is not there; install one",
            marks=(pytest.mark.own_server, pytest.mark.slow),
        ),
        ({"OPFORGE_NATIVE": "0"}, "OPFORGE_NATIVE=0 switches the native runtime off; unset it"),
    ],
)
def test_without_a_native_runtime_nothing_is_written_and_the_error_says_what_to_do(
    variables, problem, tmp_path, monkeypatch
):
    for name, value in {"OPFORGE_CACHE": str(tmp_path / "cache"), **variables}.items():
        monkeypatch.setenv(name, value)
    config = RunConfig("smoke", "directory", ops_directory=str(ROOT / "examples" / "cpp_kernels"), runtime="native")
    with pytest.raises(OpforgeError, match=f"--runtime native: {problem}.*; or judge with --runtime python"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
