"""The program for the device: it answers as eager PyTorch does, has the selected kernels and no others, and explains errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from opforge.edge import bindings, build, runner
from opforge.edge import run as run_module
from opforge.edge.runner import ATEN_LIBRARY, XNNPACK_LIBRARY, RunnerOptions, build_runner
from opforge.errors import OpforgeError
from tests.command import opforge
from tests.conftest import ROOT
from tests.edge import several
from tests.edge.several import Job, export, wanted, words
from tests.store import stored

pytest.importorskip("executorch", reason="executorch is not installed")

EXAMPLES = ROOT / "examples" / "edge"
MUL4, RICH = EXAMPLES / "mul4", EXAMPLES / "rich"
INPUTS = (ROOT / "src" / "opforge" / "edge", EXAMPLES, Path(__file__), Path(several.__file__), version("executorch"))
"""What programs and runners are made of."""

ENDS = {
    "ops.py": """
from opforge.edge.define import define
define("ends_ops::stop(Tensor x) -> Tensor", lambda x: x + 1)
define("ends_ops::refuse(Tensor x) -> Tensor", lambda x: x + 2)
""",
    "ops.yaml": """
- func: ends_ops::stop.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)
  kernels:
    - arg_meta: null
      kernel_name: ends::stop_out
- func: ends_ops::refuse.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)
  kernels:
    - arg_meta: null
      kernel_name: ends::refuse_out
""",
    "model.py": """
import ops
import torch

class Stop(torch.nn.Module):
    def forward(self, x):
        return torch.ops.ends_ops.stop(x)

class Refuse(torch.nn.Module):
    def forward(self, x):
        return torch.ops.ends_ops.refuse(x)

def inputs(rows):
    return (torch.ones(rows, 2),)
""",
    "kernels/ends.cpp": """
#include <executorch/runtime/kernel/kernel_includes.h>
namespace ends::native {
using executorch::aten::Tensor;
using executorch::runtime::KernelRuntimeContext;
Tensor& stop_out(KernelRuntimeContext&, const Tensor& x, Tensor& out) {
  ET_CHECK_MSG(x.numel() > 1000, "stop: this is the end");
  return out;
}
Tensor& refuse_out(KernelRuntimeContext& context, const Tensor& x, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, x.numel() > 1000, InvalidArgument, out, "refuse: too few elements");
  return out;
}
}
""",
}
BESIDE_ATEN = f"""
import sys
sys.path.insert(0, {str(MUL4)!r})
import ops
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.my_ops.mul4(x) + torch.sigmoid(x)

class Affine(torch.nn.Module):
    def forward(self, x):
        return torch.ops.rich_ops.affine(x, 2)

class Half(torch.nn.Module):
    def forward(self, x):
        return torch.ops.my_ops.mul4(x)

def inputs(rows):
    return (torch.randn(rows, 4),)

def whole_numbers(rows):
    return (torch.arange(rows * 4, dtype=torch.int32).reshape(rows, 4),)
"""
PLAIN = Job("mul4", str(MUL4), rows=(3,))
WHOLE = Job("mul4_int", "", rows=(3,), model="Half", inputs="whole_numbers")
BOTH = Job("mul4_aten", "", rows=(3, 5), dynamic=True, model="Model")
ALL = Job("rich", str(RICH), rows=(4, 1, 16), dynamic=True)
AFFINE = Job("affine", "", model="Affine")
STOP = Job("stop", "", model="Stop")
REFUSE = Job("refuse", "", model="Refuse")


def at(job: Job, folder: Path) -> Job:
    from dataclasses import replace

    return replace(job, folder=str(folder))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the programs, and with the operators that end badly."""
    folder = tmp_path_factory.mktemp("runner") / "programs"
    shutil.copytree(stored("programs", INPUTS, _export_all), folder)
    return folder


def _export_all(folder: Path) -> None:
    for name, text in ENDS.items():
        path = folder / "ends" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + ((MUL4 / name).read_text() if name == "ops.yaml" else ""))
    shutil.copy(MUL4 / "kernels" / "mul4.cpp", folder / "ends" / "kernels")
    beside = folder / "beside_aten"
    beside.mkdir()
    (beside / "model.py").write_text(BESIDE_ATEN)
    ends = folder / "ends"
    export(  # ALL registers the operator of AFFINE
        folder, PLAIN, at(WHOLE, beside), at(BOTH, beside), ALL, at(AFFINE, beside), at(STOP, ends), at(REFUSE, ends)
    )


@pytest.fixture(scope="module")
def all_rich() -> Path:
    """Return a folder with the program of the rich operators; the quick tests need no other."""
    return stored("rich_program", INPUTS, lambda folder: export(folder, ALL))


@pytest.fixture(scope="module")
def rich(all_rich: Path) -> Path:
    """Return a runner with what the program of the rich operators needs, which is all."""

    def make(out: Path) -> None:
        folder = build.read_folder(RICH)
        build_runner(folder, bindings.select_for_model(folder.entries, all_rich / "rich.pte"), out / "runner")

    return stored("runner", INPUTS, make) / "runner"


@pytest.fixture(scope="module")
def one(place: Path) -> runner.BuiltRunner:
    """Return a runner with one of the rich operators, its library beside it."""
    folder = build.read_folder(RICH)
    chosen = bindings.select_names(folder.entries, ["affine"])
    return build_runner(folder, chosen, place / "one" / "runner", RunnerOptions(copy_libraries=True))


@pytest.fixture(scope="module")
def mul4(place: Path) -> Path:
    """Return a runner of mul4 and of the operators that end badly, for a model that has ATen operators too."""
    folder = build.read_folder(place / "ends")
    libraries = runner.needed_libraries(place / "mul4_aten.pte")
    assert libraries == (ATEN_LIBRARY,)
    return build_runner(folder, bindings.select_all(folder.entries), place / "mul4", RunnerOptions(libraries)).path


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing of this process's environment: it needs none."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)


def difference(program: Path, place: Path, job: Job, rows: int, out: Path) -> float:
    done = run(program, *words(place, job, rows), "-o", str(out))
    assert done.returncode == 0, done.stderr
    results = wanted(place, job, rows)
    assert len(done.stdout.splitlines()) == len(results) > 0
    found = [np.load(out / f"output_{number}.npy") for number in range(len(results))]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results]
    return max(float(np.abs(x.astype(float) - y.astype(float)).max()) for x, y in zip(found, results, strict=True))


@pytest.mark.parametrize("job", [PLAIN, WHOLE], ids=lambda job: job.name)
@pytest.mark.slow
def test_an_operator_registered_in_cpp_runs(job, place, mul4, tmp_path):
    assert difference(mul4, place, job, 3, tmp_path) == 0.0


@pytest.mark.parametrize("rows", BOTH.rows)
@pytest.mark.slow
def test_atens_kernels_come_from_the_package(rows, place, mul4, tmp_path):
    assert difference(mul4, place, BOTH, rows, tmp_path) < 1e-6  # sigmoid is theirs


@pytest.mark.parametrize("rows", ALL.rows)
def test_results_lists_numbers_text_and_what_may_be_missing(rows, all_rich, rich, tmp_path):
    assert difference(rich, all_rich, ALL, rows, tmp_path) == 0.0


def test_raw_bytes_are_an_input_too(all_rich, rich, tmp_path):
    files = []
    for number in range(2):
        array = np.load(all_rich / f"rich-16-in{number}.npy")
        array.tofile(tmp_path / f"{number}.bin")
        files.append(str(tmp_path / f"{number}.bin"))
    done = run(rich, str(all_rich / "rich.pte"), *files, "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "output_0.npy"), wanted(all_rich, ALL, 16)[0])


def test_it_says_how_long_a_run_takes(all_rich, rich):
    done = run(rich, *words(all_rich, ALL, 4), "--repeat", "50")
    assert "50 runs, " in done.stdout


def own_kernels(program: Path) -> list[str]:
    listed = run(program, "--kernels").stdout.splitlines()
    assert "executorch_prim::add.Scalar" in listed
    return bindings.custom_operators(listed)


def code_bytes(path):
    done = subprocess.run(["size", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[1].split()[0])


@pytest.mark.slow
def test_what_is_not_selected_is_not_in_it(one, rich):
    assert own_kernels(rich) == list(build_names())
    assert own_kernels(one.path) == ["rich_ops::affine.out"] == list(one.operators)
    for text, kept in ((b"affine: ", True), (b"weighted_sum: ", False), (b"row_range: ", False)):
        assert (text in one.path.read_bytes()) is kept
        assert text in rich.read_bytes()
    assert code_bytes(one.path) < code_bytes(rich)  # files are as large as the pages that they fill


def build_names() -> list[str]:
    return [entry.name for entry in build.read_folder(RICH).entries]


@pytest.mark.slow
def test_a_library_has_the_kernels_that_a_model_needs_and_no_others(place, all_rich, tmp_path):
    folder = build.read_folder(RICH)
    chosen = bindings.select_for_model(folder.entries, place / "affine.pte")
    part = build.build(folder, chosen, tmp_path / "part")
    whole = build.build(folder, bindings.select_all(folder.entries), tmp_path / "whole")
    assert part.operators == ("rich_ops::affine.out",)
    assert part.left_out == ("rich_ops::weighted_sum.out", "rich_ops::row_range.out")
    table = (tmp_path / "part" / "generated" / "RegisterCodegenUnboxedKernels_0.cpp").read_text()
    assert ("affine" in table, "weighted_sum" in table, "row_range" in table) == (True, False, False)
    for library, expected in ((part, {"affine_out"}), (whole, {"affine_out", "weighted_sum_out", "row_range_out"})):
        names = subprocess.run(["nm", "-C", library.library], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"rich::native::(\w+)\(", names)) == expected
        data = library.library.read_bytes()
        assert {
            f"{name}_out" for name in ("affine", "weighted_sum", "row_range") if f"{name}: ".encode() in data
        } == expected
    assert part.loaded_bytes < whole.loaded_bytes
    with pytest.raises(OpforgeError) as raised:
        run_module.run_program(run_module.ProgramJob(all_rich / "rich.pte", (part.library,)))
    assert "rich_ops::row_range.out" in str(raised.value)
    assert "rich_ops::weighted_sum.out" in str(raised.value)


@pytest.mark.slow
def test_a_model_that_needs_more_is_refused_by_name(one, all_rich):
    done = run(one.path, *words(all_rich, ALL, 4))
    assert done.returncode == 1
    assert done.stdout == ""
    missing = "rich_ops::row_range.out, rich_ops::weighted_sum.out;"
    assert f"needs kernels that this runner was built without: {missing} build it again for this model" in done.stderr


@pytest.mark.slow
def test_it_can_be_carried_elsewhere(one, place, tmp_path):
    assert one.libraries == ("libexecutorch.so",)
    assert {path.name for path in one.path.parent.iterdir()} == {"runner", "libexecutorch.so"}
    shutil.copytree(one.path.parent, tmp_path / "device")
    data = (tmp_path / "device" / "runner").read_bytes()
    assert b"$ORIGIN" in data
    assert b"site-packages" not in data
    assert own_kernels(tmp_path / "device" / "runner") == ["rich_ops::affine.out"]
    (tmp_path / "device" / "libexecutorch.so").unlink()
    assert "libexecutorch.so" in run(tmp_path / "device" / "runner", "--kernels").stderr


def test_it_needs_no_python_and_no_torch(rich):
    done = subprocess.run(["readelf", "-d", rich], capture_output=True, text=True, check=True)
    needed = {line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line}
    assert "libexecutorch.so" in needed
    assert not [name for name in needed if "torch" in name and name != "libexecutorch.so"]
    assert not [name for name in needed if "python" in name]


@pytest.mark.slow
def test_a_kernel_that_refuses_is_heard(mul4, place):
    done = run(mul4, *words(place, REFUSE, 3))
    assert done.returncode == 1
    assert "forward failed: " in done.stderr
    assert "refuse: too few elements" in done.stderr


@pytest.mark.slow
def test_a_kernel_that_gives_up_is_heard(mul4, place):
    done = run(mul4, *words(place, STOP, 3))
    assert done.returncode == 1
    assert "a kernel or the runtime gave up: " in done.stderr
    assert "stop: this is the end" in done.stderr


@pytest.fixture(scope="module")
def wrong(all_rich: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of files that are no inputs."""
    folder = tmp_path_factory.mktemp("wrong")
    good = np.load(all_rich / "rich-4-in0.npy")
    np.save(folder / "good.npy", good)
    np.save(folder / "f64.npy", good.astype(np.float64))
    np.save(folder / "columns.npy", np.asfortranarray(good))
    np.save(folder / "many.npy", np.zeros((17, 6), np.float32))
    np.save(folder / "objects.npy", np.zeros(2, np.dtype([("a", "f4")])))
    (folder / "cut.npy").write_bytes((folder / "good.npy").read_bytes()[:150])
    (folder / "text.npy").write_text("no array at all")
    (folder / "short.bin").write_bytes(b"1234")
    (folder / "text.pte").write_text("no program at all")
    (folder / "cut.pte").write_bytes((all_rich / "rich.pte").read_bytes()[:900])
    shutil.copy(all_rich / "rich.pte", folder / "rich.pte")
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "a model is missing; usage: runner MODEL.pte INPUT"),
        (["--fast"], 2, "unknown option --fast"),
        (["rich.pte", "-o"], 2, "-o needs a value"),
        (["rich.pte", "--repeat", "many"], 2, "--repeat many is not a number of runs"),
        (["nowhere.pte"], 2, "there is no file nowhere.pte that can be read"),
        (["text.pte"], 2, "text.pte cannot be run"),
        (["cut.pte"], 2, "cut.pte cannot be run"),
        (["rich.pte", "--method", "backward"], 2, "rich.pte has no method backward; it has forward"),
        (["rich.pte", "good.npy"], 2, "forward takes 2 inputs, and 1 were given"),
        (["rich.pte", "good.npy", "nowhere.npy"], 2, "there is no file nowhere.npy"),
        (["rich.pte", "good.npy", "f64.npy"], 2, "input 1 (f64.npy) has elements <f8, and the method takes float32"),
        (
            ["rich.pte", "good.npy", "columns.npy"],
            2,
            "columns.npy is not a readable array: its columns come first",
        ),
        (["rich.pte", "good.npy", "objects.npy"], 2, "objects.npy is not a readable array: its elements are not"),
        (["rich.pte", "good.npy", "cut.npy"], 2, "input 1 (cut.npy) has 22 bytes; a tensor (4, 6) of float32 has 96"),
        (["rich.pte", "good.npy", "text.npy"], 2, "text.npy is not a readable array: it does not begin as"),
        (["rich.pte", "good.npy", "short.bin"], 2, "input 1 (short.bin) has 4 bytes; a tensor (16, 6) of float32"),
        (["rich.pte", "many.npy", "many.npy"], 1, "forward failed: "),
        (["rich.pte", "good.npy", "good.npy", "-o", "nowhere"], 2, "nowhere/output_0.npy cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_said(arguments, code, said, wrong, rich):
    done = subprocess.run([rich, *arguments], cwd=wrong, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("runner: ")
    assert said in done.stderr


def test_the_command_takes_what_was_built_before(rich, tmp_path):
    made = tmp_path / "runner"
    done = opforge("edge", "runner", str(RICH), "-o", str(made))
    assert done.returncode == 0, done.stderr
    assert made.read_bytes() == rich.read_bytes()
    first, kernels, libraries, last = done.stdout.splitlines()
    assert first.startswith(f"{made}  {made.stat().st_size:,} bytes (")
    assert kernels == f"  kernels    {', '.join(build_names())} (all)"
    assert libraries.startswith("  libraries  libexecutorch.so: ")
    assert libraries.endswith(" bytes, of the installed package")
    assert last == f"run it: {made} MODEL.pte INPUT.npy … -o FOLDER"


@pytest.mark.slow
def test_the_command_builds_it(one, rich, tmp_path):
    done = opforge(
        "edge", "runner", str(RICH), "--ops", "affine", "--beside", "--compare", "-o", str(tmp_path / "runner")
    )
    assert done.returncode == 0, done.stderr
    assert f"{one.bytes:,} bytes" in done.stdout
    assert "kernels    rich_ops::affine.out (named)" in done.stdout
    assert "left out   rich_ops::weighted_sum.out, rich_ops::row_range.out" in done.stdout
    assert re.search(r"with all 3 operators it has [\d,]+ bytes", done.stdout)
    assert os.access(tmp_path / "runner", os.X_OK)
    assert (tmp_path / "libexecutorch.so").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "x.pte", "--ops", "affine"], "--ops and --model cannot be combined; give one of them"),
        (["--ops", "afine"], "unknown operator 'afine'"),
        (["--model", "nowhere.pte"], "'nowhere.pte' cannot be read"),
        (["--format", "xml"], "unknown format 'xml'; allowed: text, json"),
        (["-o", "."], "'.' is a folder; give -o a file"),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, said):
    done = opforge("edge", "runner", str(RICH), *arguments)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_a_backend_that_a_program_names_is_linked(place, tmp_path):
    program = tmp_path / "delegated.pte"
    program.write_bytes((place / "mul4.pte").read_bytes() + b"XnnpackBackend")
    assert runner.needed_libraries(place / "mul4.pte") == ()
    assert runner.needed_libraries(program) == (XNNPACK_LIBRARY,)


@pytest.mark.slow
def test_a_model_of_other_operators_is_refused_when_it_is_built(all_rich):
    folder = build.read_folder(MUL4)
    with pytest.raises(OpforgeError, match=r"rich.pte needs rich_ops::affine.out"):
        bindings.select_for_model(folder.entries, all_rich / "rich.pte")
