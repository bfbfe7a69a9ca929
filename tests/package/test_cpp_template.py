"""The C++ variant of the template: it builds without a warning, passes its own tests, grows, travels as a wheel, and says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.command import opforge
from tests.package.packages import SCHEMAS, SEARCH, bake, environment, install, run, run_tests, wheel

NAME = "cpp_ops"
WISHES = {
    "twice": (),
    "grow_": ("--mutates",),
    "spread": ("--outputs", "2", "--optional", "bias"),
    "all_": ("--mutates", "--outputs", "2", "--optional", "bias", "--optional", "shift"),
}
NVCC = shutil.which("nvcc")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # compilers, on a machine that may be busy


def add_op(project, name):
    done = opforge("add-op", name, *WISHES[name], "--package", str(project))
    assert done.returncode == 0, done.stderr


def install_editable(project, python):
    """Install a package as its sources lie there; return what was printed on the way."""
    pip = f"{sys.executable} -m pip -v --python {python} install --no-deps --no-index --no-build-isolation"
    return run("sh", "-c", f"{pip} -e {project} 2>&1")


def own_tests(project, python, *names):
    return run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/test_{n}.py" for n in names), cwd=project
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cpp")


@pytest.fixture(scope="module")
def made(folder):
    """Return a package, a Python in which it is installed as editable, and what the build and its own tests printed."""
    project = bake(folder, NAME, "--variant", "cpp")
    python = environment(folder / "editable")
    built = install_editable(project, python)
    return project, python, built, own_tests(project, python)


@pytest.fixture(scope="module")
def grown(made):
    """Return the same with operators added, built and tested, and what that printed."""
    project, python, *_ = made
    for name in WISHES:
        add_op(project, name)
    for schema in SCHEMAS.values():
        assert opforge("add-op", schema, "--package", str(project)).returncode == 0
    built = install_editable(project, python)
    return project, python, built, own_tests(project, python, "package", *WISHES, *SCHEMAS)


@pytest.fixture(scope="module")
def packed(grown, folder):
    """Return the wheel, and a Python in which there is nothing but what it brings (and torch)."""
    file = wheel(grown[0], folder / "dist")
    return file, environment(folder / "elsewhere", file)


def test_the_package_passes_its_own_tests(made):
    _, _, built, tested = made
    assert "CUDA kernels: " in built
    assert "warning" not in built.lower()
    assert " passed" in tested
    assert "skipped" not in tested


def test_operators_that_are_added_pass_theirs(grown):
    _, _, built, tested = grown
    assert "csrc/all_.cpp" in built
    assert "csrc/swiglu.cpp" not in built, "only what is new is compiled"
    assert "warning" not in built.lower()
    assert " passed" in tested


def test_a_wheel_is_for_every_python_and_later_torch(packed):
    file, python = packed
    assert file.name.startswith(f"{NAME}-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        metadata = archive.read(f"{NAME}-0.1.0.dist-info/METADATA").decode()
    assert f"{NAME}/lib{NAME}.so" in names
    assert not [name for name in names if "csrc" in name]
    assert "Requires-Dist: torch>=2.11\n" in metadata
    code = f"""
import torch, {NAME}
x = torch.randn(3, 5)
compiled = torch.compile(lambda x: {NAME}.spread({NAME}.rms_norm(x), x)[1], fullgraph=True)
torch.testing.assert_close(compiled(x), 3 * torch.nn.functional.rms_norm(x, (5,), eps=1e-6) + x)
print({NAME}.__file__)
"""
    assert str(python.parents[1]) in run(python, "-c", code, cwd=file.parent)


@pytest.fixture(scope="module")
def site(packed):
    """Return where the package lies that is imported from the wheel."""
    return Path(run(packed[1], "-c", f"import {NAME}; print({NAME}.__path__[0])").strip())


@pytest.fixture
def copy(site, tmp_path):
    """Return a copy of what is installed, to be spoiled."""
    return shutil.copytree(site, tmp_path / NAME)


def importing(copy, code=f"import {NAME}"):
    """Return what an import of the copy ends with; ending by a signal is no answer."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, f"{done.returncode}\n{done.stderr}"
    return done.stderr


def test_a_library_that_is_not_built_is_named(copy):
    (copy / f"lib{NAME}.so").unlink()
    said = importing(copy)
    assert f"ImportError: the library of {NAME}, lib{NAME}.so, is not in {copy}: it is not built yet" in said
    assert "pip install --no-build-isolation ." in said


@pytest.mark.parametrize(
    ("built", "why"),
    [
        ({"abi": "full", "torch": "1.13.1"}, "was built with torch 1.13.1 and its full ABI, which works with no other"),
        ({"oldest": "9.9"}, "needs torch 9.9 or newer"),
    ],
)
def test_another_torch_is_refused(built, why, copy):
    file = copy / "built.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **built}))
    assert why in importing(copy)


def test_a_library_that_cannot_be_loaded_is_named(copy):
    library = copy / f"lib{NAME}.so"
    library.write_text("no library at all, but long enough to have a header to look at: " * 9)
    assert f"ImportError: {library} cannot be loaded: " in importing(copy)


def test_a_namespace_that_is_taken_is_refused_before_the_process_ends(copy):
    other = f"import torch; l = torch.library.Library('{NAME}', 'DEF'); l.define('swiglu(Tensor x) -> Tensor'); import {NAME}"
    said = importing(copy, other)
    assert f"{NAME}::swiglu are registered already" in said
    assert "two packages of one namespace cannot be used in one process" in said


def test_sources_that_changed_after_the_build_are_warned_of(grown):
    project, python, *_ = grown
    code = f"import warnings; warnings.simplefilter('error', UserWarning); import {NAME}; print('fine')"
    assert "fine" in run(python, "-c", code)
    source = project / "src" / "csrc" / "twice.cpp"
    before = source.stat()
    try:
        os.utime(source, (before.st_atime, before.st_mtime + 1e6))
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    finally:
        os.utime(source, (before.st_atime, before.st_mtime))
    assert "UserWarning: twice.cpp changed after " in done.stderr


def configure(project, build, *options):
    """Return what CMake says of a package, and whether it accepted it."""
    command = ["cmake", "-S", project, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, "PATH": SEARCH}, check=False
    )
    return " ".join((done.stdout + done.stderr).split()), done.returncode == 0


@pytest.mark.parametrize(
    ("options", "accepted", "said"),
    [
        (["-DNVCC=OFF"], True, "CUDA kernels: not built, because there is no nvcc on the PATH"),
        (["-DNVCC=OFF", "-DWITH_CUDA=ON"], False, "WITH_CUDA is ON, and there is no nvcc on the PATH"),
    ],
)
def test_cmake_says_what_it_does_and_why_not(options, accepted, said, made, tmp_path):
    output, fine = configure(made[0], tmp_path, *options)
    assert said in output
    assert fine == accepted


def test_a_python_without_torch_is_named(made, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    output, fine = configure(made[0], tmp_path / "build", f"-DPython_EXECUTABLE={python}")
    assert f"{python} cannot import torch, for which the library is built. Install torch there" in output
    assert not fine


def test_a_torch_that_is_too_old_is_refused(tmp_path):
    project = bake(tmp_path, NAME, "--variant", "cpp", "--torch", "9.9")
    output, fine = configure(project, tmp_path / "build", "-DNVCC=OFF")
    assert "and this package is for torch 9.9 and newer: install a newer one" in output
    assert not fine


@pytest.mark.skipif(NVCC is None, reason="CUDA's compiler is not here")
def test_cuda_sources_compile_without_a_warning(grown, tmp_path):
    output, fine = configure(grown[0], tmp_path, "-DWITH_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90")
    assert fine, output
    assert f"CUDA kernels: built by {NVCC}" in output
    objects = [f"CMakeFiles/kernels.dir/src/csrc/{name}.cu.o" for name in ("rms_norm", "all_")]
    said = run("ninja", "-v", *objects, cwd=tmp_path)
    assert all((tmp_path / file).is_file() for file in objects)
    assert "warning" not in said.lower()


def test_the_full_abi_is_for_the_torch_it_was_built_with(folder, monkeypatch):
    monkeypatch.setenv("SKBUILD_CMAKE_BUILD_TYPE", "Debug")  # half the time, and the same ABI
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", "CMAKE_CXX_FLAGS_DEBUG=-O0")  # nobody looks at its symbols
    project = bake(folder / "whole", NAME, "--variant", "cpp", "--abi", "full")
    add_op(project, "spread")
    target = install(project, folder / "whole" / "site")
    version = run(sys.executable, "-c", "import torch; print('.'.join(torch.__version__.split('.')[:2]))").strip()
    metadata = (target / f"{NAME}-0.1.0.dist-info" / "METADATA").read_text()
    assert f"Requires-Dist: torch=={version}.*\n" in metadata
    words = (f"tests/test_{name}.py" for name in ("package", "add_scaled_", "spread"))
    assert " passed" in run_tests(project, target, *words)
