"""Packages of `opforge new` go to the device when nothing but the C++ kernel is added."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from opforge.edge import bindings, build
from opforge.edge.runner import build_runner
from tests.command import opforge
from tests.conftest import slow
from tests.edge.several import Job, export, wanted, words
from tests.edge.test_runner import run as run_program
from tests.package.packages import stored_package

BODIES = {
    "swiglu": """
  ET_KERNEL_CHECK_MSG(context, executorch::runtime::resize_tensor(out, gate.sizes()) == Error::Ok, InvalidArgument, out, "swiglu: size");
  for (ssize_t i = 0; i < gate.numel(); ++i) {
    const float x = gate.const_data_ptr<float>()[i];
    out.mutable_data_ptr<float>()[i] = x * (1.0f / (1.0f + std::exp(-x))) * up.const_data_ptr<float>()[i];
  }
""",
    "row_moments": """
  const ArrayRef<Tensor::SizesType> sizes(x.sizes().data(), x.dim() - 1);
  ET_KERNEL_CHECK_MSG(context, executorch::runtime::resize_tensor(out0, sizes) == Error::Ok, InvalidArgument, results, "row_moments: size");
  ET_KERNEL_CHECK_MSG(context, executorch::runtime::resize_tensor(out1, sizes) == Error::Ok, InvalidArgument, results, "row_moments: size");
  const ssize_t width = x.size(x.dim() - 1);
  for (ssize_t row = 0; row < out0.numel(); ++row) {
    const float* from = x.const_data_ptr<float>() + row * width;
    double sum = 0, squares = 0;
    for (ssize_t i = 0; i < width; ++i) sum += from[i];
    const double mean = sum / width;
    for (ssize_t i = 0; i < width; ++i) squares += (from[i] - mean) * (from[i] - mean);
    out0.mutable_data_ptr<float>()[row] = static_cast<float>(mean);
    out1.mutable_data_ptr<float>()[row] = static_cast<float>(squares / width);
  }
""",
}
TWO = """

class Two(torch.nn.Module):
    def forward(self, gate, up):
        y = torch.ops.NAMESPACE.swiglu(gate, up)
        return y, *torch.ops.NAMESPACE.row_moments(y)


def two(rows):
    torch.manual_seed(rows)
    return torch.randn(rows, 8), torch.randn(rows, 8)
"""
CPP, TRITON = "cpp_ops", "triton_ops"
MORE = {"TRITON_INTERPRET": "1"}
"""Without a GPU Triton's kernels are interpreted, here and wherever such a package is exported on the CPU."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which two packages are installed, one of each kind, just as they were made."""
    target = tmp_path_factory.mktemp("packages") / "target"
    for name, variant in ((CPP, "cpp"), (TRITON, "triton")):
        shutil.copytree(stored_package(name, variant).target, target, dirs_exist_ok=True)
    return target


@pytest.fixture(scope="module")
def place(target: Path) -> Path:
    """Return a folder with an operator folder for each package, kernels written but for one, and their programs."""
    folder = target.parent
    for name, ops in ((CPP, ("swiglu", "row_moments", "rms_norm")), (TRITON, ("swiglu", "row_moments"))):
        words_ = [word for op in ops for word in ("--op", op)]
        said = take(name, *words_, "-o", str(folder / name / "edge"), target=target)
        assert f"write the kernel in {folder / name / 'edge' / 'kernels' / 'swiglu.cpp'}" in said
        for op, body in BODIES.items():
            write_body(folder / name / "edge" / "kernels" / f"{op}.cpp", body)
        model = folder / name / "edge" / "model.py"
        model.write_text(model.read_text() + TWO.replace("NAMESPACE", name))
    export(
        folder, *(job(name, folder) for name in (CPP, TRITON)), all_of(folder), PYTHONPATH=python_path(target), **MORE
    )
    return folder


def job(name: str, folder: Path) -> Job:
    return Job(name, str(folder / name / "edge"), rows=(4, 1, 16), dynamic=True, model="Two", inputs="two")


def all_of(folder: Path) -> Job:
    return Job("all", str(folder / CPP / "edge"), rows=(4,))


def python_path(target: Path) -> str:
    return f"{Path(build.__file__).parents[2]}:{target}"


def take(*arguments: str, target: Path) -> str:
    done = opforge("edge", "take", *arguments, PYTHONPATH=python_path(target), **MORE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_body(path: Path, body: str) -> None:
    """Write a kernel where the made file says that it is not written yet, and change nothing else."""
    text = path.read_text()
    filled, count = re.subn(r"\n  ET_KERNEL_CHECK_MSG\(context, false, NotImplemented.*\n", lambda _: body, text)
    assert count == 1
    path.write_text(filled.replace("#include <tuple>", "#include <cmath>\n#include <tuple>"))


@pytest.fixture(scope="module")
def runners(place: Path) -> dict[str, Path]:
    made = {}
    for name in (CPP, TRITON):
        folder = build.read_folder(place / name / "edge")
        made[name] = build_runner(folder, bindings.select_all(folder.entries), place / f"{name}_runner").path
    return made


def test_a_folder_is_made_of_a_package(target, tmp_path):
    edge = tmp_path / "edge"
    said = take(TRITON, "--op", "swiglu", "--op", "row_moments", "-o", str(edge), target=target)
    assert f"write the kernel in {edge / 'kernels' / 'swiglu.cpp'}" in said
    entries = {entry.name: entry for entry in build.read_folder(edge).entries}
    assert set(entries) == {f"{TRITON}::swiglu.out", f"{TRITON}::row_moments.out"}
    assert "Tensor out0" in (edge / "kernels" / "row_moments.cpp").read_text().replace("& ", " ")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 1, 16])
@pytest.mark.parametrize(("name", "allowed"), [(CPP, 0.0), (TRITON, 1e-6)])  # NumPy's exp rounds in its own way
def test_a_package_runs_on_the_device(name, allowed, rows, place, runners, tmp_path):
    one = job(name, place)
    done = run_program(runners[name], *words(place, one, rows), "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = wanted(place, one, rows)
    assert [result.shape for result in results] == [(rows, 8), (rows,), (rows,)]
    for number, result in enumerate(results):
        found = np.load(tmp_path / f"output_{number}.npy")
        assert found.dtype == result.dtype
        assert np.abs(found - result).max() <= allowed


@pytest.mark.slow
def test_a_kernel_that_is_not_written_says_so(place, runners):
    done = run_program(runners[CPP], *words(place, all_of(place), 4))
    assert done.returncode == 1
    assert "rms_norm: the kernel in kernels/rms_norm.cpp is not written yet" in done.stderr


@pytest.mark.parametrize(
    ("op", "said"),
    [
        slow("swiglo", "unknown operator 'swiglo'; did you mean 'swiglu'"),
        ("add_scaled_", f"{CPP}::add_scaled_ writes to an argument; take operators that return new tensors"),
    ],
)
def test_what_cannot_be_taken_is_refused(op, said, target, tmp_path):
    words = ("edge", "take", CPP, "--op", op, "-o", str(tmp_path / "edge"))
    done = opforge(*words, PYTHONPATH=python_path(target))
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "edge").exists()
