"""Programs are made and run in processes of their own; what goes wrong there is said in our words. One process exports, one runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from opforge.edge import export as export_module
from opforge.edge import lowering
from opforge.edge import run as run_module
from opforge.edge.bindings import BindingEntry, BindingError, KernelBinding, select_all, select_for_model, select_names
from opforge.edge.build import build, read_folder
from opforge.edge.export import ExportRequest, ExportResult, write_program
from opforge.edge.model_loading import refuse_decomposed
from opforge.edge.program import program_operators
from opforge.edge.run import ProgramJob, ProgramResult, run_programs
from opforge.edge.toolchain import Product, compile_product
from opforge.errors import OpforgeError
from tests.command import opforge
from tests.conftest import ROOT, slow
from tests.edge import folders
from tests.store import stored

EXPORTS_FROM = (ROOT / "src" / "opforge" / "edge", Path(folders.__file__), Path(__file__).with_name("exporting.py"))
"""What the programs come from."""


@dataclass(frozen=True)
class Exports:
    place: Path
    said: dict[str, str | list[str]]

    def __getitem__(self, name: str) -> Path:
        return self.place / f"{name}.pte"


@pytest.fixture(scope="module")
def exports() -> Exports:
    place = stored("exports", [*EXPORTS_FROM, version("executorch")], _export)
    return Exports(place, json.loads((place / "said.json").read_text()))


def _export(place: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "tests.edge.exporting", str(place)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}, cwd=place
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        ("mul3", ["my_ops::mul3.out"]),
        slow("both", ["my_ops::also3.out", "my_ops::mul3.out"]),
        slow("varying", ["my_ops::mul3.out"]),
        slow("with_numpy", ["my_ops::with_numpy.out"]),
        slow("adds_too", ["aten::add.out", "my_ops::add.out"]),
    ],
)
def test_a_program_calls_the_out_variants(exports, model, operators):
    assert exports.said[model] == operators
    assert program_operators(exports[model]) == operators


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("lone", "my_ops::lone has no out variant, which the runtime calls; register my_ops::lone.out(Tensor x, *,"),
        ("other_names", "takes (x), and its out variant (y): both must have the same argument names"),
        ("no_fake", "my_ops::no_fake has no fake"),
        ("fixed", "dimension 0 of x cannot vary: the model's code fixes it to 4"),
        ("no_such_input", "names the input 'y'; forward has x"),
        ("no_such_dimension", "there is no dimension 2"),
        ("out_of_range", "dimension 0 of x is 4 in the example inputs; to be dynamic from 5 to 8"),
    ],
)
def test_a_model_that_cannot_be_exported_is_told_why(exports, model, said):
    assert said in exports.said[model]
    assert not exports[model].exists()


def test_a_composite_operator_is_taken_apart_and_that_is_noticed(exports):
    assert "without my_ops::composite" in exports.said["composite"]
    assert not any(name.startswith("my_ops::") for name in exports.said["composite"])
    entry = BindingEntry("my_ops::composite.out", "", (KernelBinding("my_ops::composite_out"),))
    with pytest.raises(BindingError, match="my_ops::composite is in the model but not in the program"):
        refuse_decomposed([entry], ["my_ops::composite"])
    refuse_decomposed([entry], ["my_ops::another"])


def test_the_command_says_what_was_exported(exports, tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text("")
    program = exports["mul3"]
    asked: list[ExportRequest] = []
    inputs, size = "((T([4, 3], f32),), {})", program.stat().st_size
    reply = ExportResult(program, tuple(exports.said["adds_too"]), 2, ("my_ops::composite",), inputs, size)
    monkeypatch.setattr(export_module, "ask", lambda _step, request, **_: asked.append(request) or reply)
    words = ("edge", "export", "net.py", "-o", "net.pte", "--dynamic", "x.0=1..8")
    done = opforge(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"wrote net.pte, {size} bytes, in ")
    assert rest == [
        "inputs     ((T([4, 3], f32),), {})",
        "operators  aten::add.out, my_ops::add.out",
        "delegated  2 parts to XNNPACK",
        "note       my_ops::composite was decomposed because it is CompositeImplicitAutograd: a kernel for it would not run",
        "needs      kernels of my_ops::add.out: opforge edge build DIR --model net.pte",
    ]
    assert (asked[0].dynamic, asked[0].out) == ({"x": {0: (1, 8)}}, tmp_path / "net.pte")
    answer = json.loads(opforge(*words, "--format", "json", cwd=tmp_path).stdout)
    assert (answer["path"], answer["custom"], answer["delegated"]) == ("net.pte", ["my_ops::add.out"], 2)


def test_a_program_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model.pte"
    write_program(path, b"first")
    write_program(path, b"second")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"model.pte": b"second"}
    (tmp_path / "folder.pte").mkdir()
    with pytest.raises(OpforgeError, match=r"folder.pte' cannot be written: "):
        write_program(tmp_path / "folder.pte", b"third")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.pte", "model.pte"]


@pytest.mark.slow
def test_xnnpack_parts_are_delegated_beside_a_custom_operator(exports, ran):
    assert exports.said["delegated"] == ["my_ops::mul3.out"]
    assert exports.said["delegated delegates"] == 2
    assert exports.said["mul3 delegates"] == 0
    assert ran["delegated"].error == ""
    assert ran["delegated"].kernels == {"my_ops::mul3.out": 1}
    assert ran["delegated"].results[0].first == pytest.approx([36.0] * 6, abs=1e-4)


@pytest.mark.slow
def test_a_kernel_of_its_own_for_a_dtype_and_dimension_order_is_called(exports, tmp_path):
    folder = folders.make(tmp_path / "special", "mul3")
    (folder / "ops.yaml").write_text(
        folders.SPECIALIZED.replace("F: [Float]", "F: [Double]").replace("I: [Int, Long]", "I: [Float]")
    )
    source = (folder / "kernels" / "mul3.cpp").read_text()
    for name, added in (("mul3_row", 100), ("mul3_integers", 200)):
        (folder / "kernels" / f"{name}.cpp").write_text(
            source.replace("mul3_out", name).replace("* 3)", f"* 3 + {added})")
        )
    opened = read_folder(folder)
    library = build(opened, select_all(opened.entries)).library
    (ran,) = run_programs([ProgramJob(exports["mul3"], (library,), "T([4, 3], f32)")])
    assert ran.error == ""
    assert min(ran.results[0].first) > 100, "the program's x is float32 with two dimensions"


def test_without_what_delegation_needs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch.exir", SimpleNamespace(to_edge=None, to_edge_transform_and_lower=None))

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("executorch.backends.xnnpack"):
                raise ModuleNotFoundError("No module named 'torchao'", name="torchao")

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(OpforgeError, match="delegating to XNNPACK needs torchao"):
        lowering._to_edge(None, xnnpack=True)


@pytest.fixture(scope="module")
def ran(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProgramResult]:
    """Run everything in one process, each program in a fork of it."""
    place = tmp_path_factory.mktemp("libraries")
    folder = read_folder(folders.make(place / "all", *folders.BODIES, together=True))
    whole = build(folder, select_all(folder.entries), place / "whole").library
    two = read_folder(folders.make(place / "two", "mul3", "also3", together=True))
    part = build(two, select_names(two.entries, ["mul3"])).library
    override = place / "override.so"
    (place / "override.cpp").write_text(folders.OVERRIDES)
    compile_product(Product("override", (place / "override.cpp",)), override)
    no_library, broken = place / "text.so", place / "broken.pte"
    no_library.write_text("not a library")
    broken.write_bytes(exports["mul3"].read_bytes()[:64] + b"\xff" * 64)
    given = place / "given.safetensors"
    save_file({"0": np.full((4, 3), 2.0, np.float32)}, given)
    jobs = {
        "right": ProgramJob(exports["mul3"], (whole,), "T([4, 3], f32)", out=place / "results.safetensors"),
        "as described": ProgramJob(exports["mul3"], (whole,)),
        "selected": ProgramJob(exports["mul3"], (part,)),
        "unselected": ProgramJob(exports["both"], (part,)),
        "no library": ProgramJob(exports["mul3"]),
        "twice": ProgramJob(exports["mul3"], (whole, part)),
        "overrides": ProgramJob(exports["mul3"], (override,)),
        "aborts": ProgramJob(exports["aborts"], (whole,)),
        "refuses": ProgramJob(exports["refuses"], (whole,)),
        "hangs": ProgramJob(exports["hangs"], (whole,), limit_s=1.0),
        "two adds": ProgramJob(exports["adds_too"], (whole,)),
        "larger": ProgramJob(exports["varying"], (whole,), "((T([8, 3], f32),), {})"),
        "too large": ProgramJob(exports["varying"], (whole,), "T([9, 3], f32)"),
        "unsized": ProgramJob(exports["varying_unsized"], (whole,), "T([2, 3], f32)"),
        "other shape": ProgramJob(exports["mul3"], (whole,), "T([4, 4], f32)"),
        "other dtype": ProgramJob(exports["mul3"], (whole,), "T([4, 3], i64)"),
        "too many": ProgramJob(exports["mul3"], (whole,), "T([4, 3], f32), T([4, 3], f32)"),
        "named": ProgramJob(exports["mul3"], (whole,), "((), {'x': T([4, 3], f32)})"),
        "no file": ProgramJob(exports["mul3"], (whole,), inputs_file=no_library),
        "delegated": ProgramJob(exports["delegated"], (whole,), inputs_file=given),
        "from file": ProgramJob(exports["mul3"], (whole,), inputs_file=given),
        "text as library": ProgramJob(exports["mul3"], (no_library,)),
        "broken": ProgramJob(broken, (whole,)),
    }
    return dict(zip(jobs, run_programs(list(jobs.values())), strict=True))


@pytest.mark.parametrize("name", ["right", "as described", "selected", "larger", "from file"])
def test_a_program_runs_on_its_library_and_the_trace_names_the_kernel(ran, name):
    assert ran[name].error == ""
    assert ran[name].kernels == {"my_ops::mul3.out": 1}
    assert ran[name].results[0].shape == ((8, 3) if name == "larger" else (4, 3))


def test_inputs_come_from_a_file_and_results_go_to_one(ran):
    assert ran["from file"].results[0].first == (6.0,) * 6
    out = ran["right"].job.out
    assert load_file(out)["0"].reshape(-1)[:6].tolist() == list(ran["right"].results[0].first)


def test_the_trace_tells_operators_of_one_name_apart(ran):
    assert ran["two adds"].kernels == {"my_ops::add.out": 1, "aten::add.out": 1}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unselected", "needs my_ops::also3.out, and no kernel is registered for it"),
        ("no library", "needs my_ops::mul3.out, and no kernel is registered for it (no library was given)"),
        ("twice", "registers my_ops::mul3.out, which is registered already"),
        ("overrides", "registers aten::add.out, which is registered already"),
        ("aborts", "died of SIGABRT (signal 6) while it ran. Output: "),
        ("aborts", "a kernel that gives up"),
        ("refuses", "seven dimensions are wanted"),
        ("hangs", "was stopped after 1 s without a result"),
        ("too large", "do not fit"),
        ("other shape", "Expected shape (4, 3), but received (4, 4)"),
        ("other shape", "or export it with --dynamic"),
        ("other dtype", "expected Float but was Long"),
        ("too many", "2 inputs were given"),
        ("named", "have no names"),
        ("no file", "cannot be read as safetensors"),
        ("text as library", "cannot be loaded"),
        ("broken", "broken.pte"),
    ],
)
def test_a_run_that_fails_says_why(ran, name, said):
    assert said in ran[name].error
    assert not ran[name].results


def test_the_command_shows_results_and_the_kernels_that_ran(ran, monkeypatch):
    given: list[ProgramJob] = []
    monkeypatch.setattr(run_module, "run_programs", lambda jobs: given.extend(jobs) or [ran["two adds"]])
    words = ("edge", "run", "m.pte", "--library", "a.so", "--library", "b.so", "--seed", "3", "--timeout", "9")
    done = opforge(*words, "--inputs", "T([4, 3], f32)", "-o", "kept.safetensors")
    assert done.returncode == 0, done.stderr
    result = ran["two adds"].results[0]
    numbers = ", ".join(f"{value:.6g}" for value in result.first)
    assert done.stdout.splitlines() == [
        f"inputs   {ran['two adds'].inputs}",
        f"result 0 T([4, 3], {result.dtype})  {numbers}, …",
        "kernels  my_ops::add.out 1×, aten::add.out 1×",
    ]
    libraries, kept = (Path("a.so"), Path("b.so")), Path("kept.safetensors")
    assert given == [ProgramJob(Path("m.pte"), libraries, "T([4, 3], f32)", seed=3, out=kept, limit_s=9.0)]
    answer = json.loads(opforge("edge", "run", "m.pte", "--inputs", "x.safetensors", "--format", "json").stdout)
    assert (answer["results"], answer["kernels"]) == (
        [{"type": result.type, "shape": [4, 3], "dtype": result.dtype, "first": list(result.first)}],
        ran["two adds"].kernels,
    )
    assert given[1] == ProgramJob(Path("m.pte"), inputs_file=Path("x.safetensors"))


def test_the_command_fails_with_the_reason(ran, monkeypatch):
    monkeypatch.setattr(run_module, "run_programs", lambda _jobs: [ran["refuses"]])
    done = opforge("edge", "run", "m.pte")
    assert (done.returncode, done.stdout) == (1, "")
    assert "seven dimensions are wanted" in done.stderr
    none = opforge("edge", "run", "m.pte", "--timeout", "0")
    assert none.returncode == 2
    assert "--timeout 0.0 is out of range; it must be 0.1 to 86,400" in none.stderr


def test_missing_operators_are_listed(ran):
    assert ran["unselected"].missing == ("my_ops::also3.out",)
    assert ran["right"].missing == ()


def test_a_kernel_that_does_not_resize_is_not_silently_right(ran):
    assert ran["unsized"].error or ran["unsized"].results[0].shape != (2, 3)


@pytest.mark.slow
def test_a_model_selects_what_it_needs_and_a_missing_entry_is_named(exports, tmp_path):
    folder = read_folder(folders.make(tmp_path / "three", "mul3", "unsized"))
    assert select_for_model(folder.entries, exports["mul3"]).names == ("my_ops::mul3.out",)
    with pytest.raises(BindingError, match=r"both.pte needs my_ops::also3.out, and no entry binds it"):
        select_for_model(folder.entries, exports["both"])


@pytest.mark.parametrize("model", [slow("mul3"), "delegated"])
@pytest.mark.parametrize("kept", [slow(slice(16)), slow(slice(400)), slice(-1)])
def test_a_program_that_is_cut_off_is_refused(exports, tmp_path, model, kept):
    cut = tmp_path / "cut.pte"
    cut.write_bytes(exports[model].read_bytes()[kept])
    with pytest.raises(OpforgeError, match=r"cannot be read as a program of ExecuTorch: .* cut off or damaged"):
        program_operators(cut)


def test_files_that_are_not_there_are_named(exports, tmp_path):
    with pytest.raises(OpforgeError, match="there is no library"):
        run_programs([ProgramJob(exports["mul3"], (tmp_path / "none.so",))])
    with pytest.raises(OpforgeError, match="there is no file"):
        run_programs([ProgramJob(exports["mul3"], inputs_file=tmp_path / "none.safetensors")])
