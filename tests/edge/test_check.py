"""A folder is taken all the way to the runtime: a right one passes, and a wrong kernel is found where it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opforge.cli.edge import _lines
from opforge.edge import check
from opforge.edge.bindings import BindingError
from opforge.edge.export import parse_target
from opforge.edge.from_package import PackageOperator
from opforge.edge.init import make_folder
from opforge.edge.model_loading import ModelLoadError, load_model
from opforge.edge.toolchain import templates
from opforge.errors import NothingToJudgeError
from opforge.kernels.native.compiler import BuildError
from tests.command import opforge
from tests.edge import folders

MODEL = """
import torch

import ops


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.my_ops.unsized(x), torch.ops.my_ops.wrong_ints(x)


def model():
    return Model()


def inputs():
    return (torch.ones(2, 3),)


def cases():
    return [(torch.linspace(-1, 1, 6).reshape(2, 3),), (torch.arange(6, dtype=torch.int32).reshape(2, 3),)]


def dynamic():
    return {"x": {0: (1, 5)}}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> check.EdgeCheckReport:
    names = ("also3", "unsized", "wrong_ints")
    folder = folders.make(tmp_path_factory.mktemp("check") / "wrong", *names, together=True)
    (folder / "model.py").write_text(MODEL)
    return check.check(folder)


@pytest.fixture
def say(found: check.EdgeCheckReport, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that gives the command's answer; the folder is not taken to the runtime again."""
    monkeypatch.setattr(check, "check", lambda *_, **__: found)

    def said(*words: str) -> str:
        done = opforge("edge", "check", found.folder, *words)
        assert done.returncode == 1, done.stderr
        return done.stdout

    return said


@pytest.fixture
def report(say: Callable[..., str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(say("--format", "json"))
    return answer


def rows(report: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in report["rows"] if row["kind"] == kind}


def test_a_wrong_kernel_is_found_in_the_dtype_in_which_it_is_wrong(report):
    static = rows(report, "static")
    assert static["((T([2, 3], f32),), {})"]["verdict"] == "passed"
    assert static["((T([2, 3], f32),), {})"]["difference"] == 0.0
    wrong = static["((T([2, 3], i32),), {})"]
    assert (wrong["verdict"], wrong["difference"]) == ("wrong", 1.0)
    assert wrong["reason"].startswith("result 1:")


def test_a_kernel_that_does_not_resize_is_found_by_dynamic_shapes(report):
    dynamic = rows(report, "dynamic")
    smallest = dynamic["((T([1, 3], f32),), {})"]
    assert smallest["verdict"] == "wrong"
    assert smallest["reason"].startswith("result 0:")
    assert dynamic["((T([5, 3], f32),), {})"]["verdict"] == "passed", "the largest size is the planned one"


def test_the_trace_proves_that_each_kernel_ran(report):
    ran = {"my_ops::unsized.out": 1, "my_ops::wrong_ints.out": 1}
    assert all(row["kernels"] == ran for row in report["rows"] if row["kind"] in ("static", "dynamic"))


def test_each_call_is_judged_by_itself_too(report):
    (row,) = rows(report, "calls").values()
    assert (row["case"], row["verdict"]) == ("4 calls, each by itself", "wrong")
    assert row["reason"].startswith("my_ops::wrong_ints(T([2, 3], i32)), result ")


def test_each_operator_is_missed_when_it_is_left_out(report):
    without = [row for row in report["rows"] if row["kind"].startswith("without")]
    assert sorted((row["kind"], row["verdict"]) for row in without) == [
        ("without my_ops::unsized.out", "passed"),
        ("without my_ops::wrong_ints.out", "passed"),
    ]


def test_what_the_model_does_not_use_is_said(report):
    assert report["unused"] == ["my_ops::also3.out"]
    assert report["right"] is False


def test_the_same_in_words(found, say):
    lines = say().splitlines()
    assert lines[0].startswith(f"{found.folder} (")
    assert lines[1:3] == [
        "operators  my_ops::unsized.out, my_ops::wrong_ints.out",
        "unused     my_ops::also3.out: model.py does not use it, so it was not checked",
    ]
    assert lines[3] == f"library    {found.library_bytes} bytes, direct"
    kernels = "my_ops::unsized.out 1×, my_ops::wrong_ints.out 1×"
    assert f"((T([2, 3], f32),), {{}})  static   passed   difference 0, {kernels}" in lines
    wrong = lines.index(f"((T([2, 3], i32),), {{}})  static   wrong    difference 1, {kernels}")
    assert lines[wrong + 1].startswith("  result 1: ")
    assert "without my_ops::unsized.out  passed  missing, as expected" in lines
    passed = sum(row.verdict == "passed" for row in found.rows)
    assert lines[-2] == f"{passed} passed, {len(found.rows) - passed} wrong"
    assert lines[-1].startswith("seconds    build ")


@pytest.mark.slow
def test_a_new_folder_passes_its_own_tests(tmp_path):
    folder = tmp_path / "fresh"
    make_folder(folder, "fresh_ops", ["scale"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_kernel_that_is_not_written_is_named_before_anything_is_built(tmp_path):
    folder = folders.make(tmp_path / "new", "mul3", "also3")
    (folder / "model.py").write_text(MODEL)
    declaration = "Tensor& mul3_out(KernelRuntimeContext& context, const Tensor& x, Tensor& out)"
    operator = PackageOperator("my_ops::mul3", "", ("out",), ("x",), ("mul3_x",), declaration)
    (folder / "kernels" / "mul3.cpp").write_text(
        templates("taken").get_template("kernels/op.cpp.j2").render(op=operator)
    )
    done = opforge("edge", "check", str(folder))
    assert done.returncode == 1
    assert done.stderr.count("not written yet") == 1
    assert str(folder / "kernels" / "mul3.cpp") in done.stderr
    assert "also3" not in done.stderr
    assert not list((folder / "build" / "check").iterdir())


@pytest.mark.slow
def test_an_operator_without_a_kernel_is_named_before_anything_is_exported(tmp_path, monkeypatch):
    folder = folders.make(tmp_path / "none", "mul3")
    (folder / "model.py").write_text(MODEL)
    (folder / "kernels" / "mul3.cpp").write_text(folders.kernel("other", folders.RIGHT))
    monkeypatch.setattr(check, "ask", lambda *_, **__: pytest.fail("it was exported"))
    with pytest.raises(BuildError, match=r"binds my_ops::mul3.out to kernel_name my_ops::mul3_out, and no source"):
        check.check(folder)


def test_a_reason_is_said_once():
    same = [check.CheckRow(f"case {number}", "static", "error", "it refuses") for number in range(8)]
    other = check.CheckRow("case 8", "static", "error", "it ends")
    report = check.EdgeCheckReport("ops", {}, ("my_ops::mul3.out",), (), "direct", 1, (*same, other, same[0]), {})
    text = "\n".join(_lines(report))
    assert text.count("it refuses") == 1
    assert text.count("as above") == 8
    assert text.count("it ends") == 1


def program(*operators: str) -> tuple[check.CheckedProgram]:
    return (check.CheckedProgram("static", "((), {})", Path("none.pte"), operators),)


@pytest.mark.parametrize(
    ("operators", "error", "said"),
    [
        (["my_ops::other.out"], BindingError, "uses my_ops::other.out, and .* has no entry for it"),
        (["aten::add.out"], NothingToJudgeError, "uses no operator of"),
    ],
)
def test_a_model_that_does_not_fit_its_folder_is_refused(tmp_path, monkeypatch, operators, error, said):
    folder = folders.make(tmp_path / "one", "mul3")
    (folder / "model.py").write_text(MODEL)
    monkeypatch.setattr(check, "ask", lambda *_, **__: check.CheckedPrograms(program(*operators)))
    with pytest.raises(error, match=said):
        check.check(folder)


def test_an_export_that_fails_leaves_the_program_that_was_there(tmp_path):
    (tmp_path / "net.py").write_text(
        "def model():\n    raise ValueError('no weights')\n\n\ndef inputs():\n    return ()\n"
    )
    before = tmp_path / "model.pte"
    before.write_text("as it was")
    done = opforge("edge", "export", str(tmp_path / "net.py"), "-o", str(before))
    assert done.returncode == 1
    assert "model() of" in done.stderr
    assert "raised ValueError: no weights" in done.stderr
    assert before.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["model.pte", "net.py"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "no_such_module"),
        ("model = 3", "model is int, not a function"),
        ("def other(): ...", "does not define model"),
        ("def model(): return 3", "a model without inputs"),
        ("def model(): return 3, ()", "gives int, not a torch.nn.Module"),
        ("import torch\ndef model(): return torch.nn.ReLU(), 3", "the inputs are int"),
        ("import torch\ndef model(): return torch.nn.ReLU(), {'y': torch.ones(2)}", "inputs name 'y'"),
    ],
)
def test_a_file_without_a_model_is_told_what_it_must_have(tmp_path, monkeypatch, source, said):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(source)
    with pytest.raises(ModelLoadError, match=said):
        load_model(parse_target(str(tmp_path / "net.py")))


def test_an_export_to_nowhere_is_refused_at_once(tmp_path):
    (tmp_path / "net.py").write_text("")
    done = opforge("edge", "export", str(tmp_path / "net.py"), "-o", str(tmp_path / "none" / "model.pte"))
    assert done.returncode == 2
    assert "its folder does not exist" in done.stderr
