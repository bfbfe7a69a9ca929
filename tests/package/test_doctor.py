"""The doctor says what is there, and what would break with its fix."""

from __future__ import annotations

import json
import sys
import sysconfig

import pytest
import torch

from opforge.kernels.native import toolchain
from opforge.package import doctor
from opforge.runtime.native import building
from tests.command import opforge
from tests.conftest import ROOT
from tests.native import ABORTS, compiler, registering, write
from tests.torch_native import needs_torch_native, overriding_relu


def test_an_installation_as_it_is(tmp_path):
    done = opforge("doctor", str(ROOT / "examples" / "cpp_matmul"), "--format", "json")
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["problems"] else 0)
    assert answer["python"]["suffix"] == sysconfig.get_config_var("EXT_SUFFIX")
    assert answer["torch"]["version"] == torch.__version__
    assert answer["torch"]["cxx11_abi"] is torch._C._GLIBCXX_USE_CXX11_ABI
    assert answer["compilers"]["cxx"] == toolchain.cxx().path
    assert {"held", "missing"} <= set(answer["confinement"])
    assert {"wanted", "library", "layout", "launch_plans"} <= set(answer["native_runtime"])
    assert [m["name"] for m in answer["folder"]["modules"]] == ["matmul_blocked", "matmul_naive"]
    assert answer["folder"]["modules"][1]["target"] == "matmul_naive.so"
    assert answer["folder"]["modules"][1]["operators"] == ["matmul_naive::mm"]
    assert "pip install" in answer["extras"]["ray"].get("install", "pip install")


def test_no_compiler_is_a_problem_with_a_fix():
    done = opforge("doctor", CXX="/nowhere/c++")
    assert done.returncode == 1
    assert "problem  C++ kernels cannot be built: CXX names '/nowhere/c++', which is not there" in done.stdout
    assert "  fix    install one, for example with `apt install g++`, or set CXX to its path" in done.stdout
    assert done.stdout.endswith("1 problem\n")


@pytest.fixture
def quick(monkeypatch):
    """Have a doctor that does not try confinement out, which starts a process with torch."""
    monkeypatch.setattr(doctor, "start_server", lambda _device: pytest.fail("asked for a server"))
    monkeypatch.setattr(doctor, "_confinement", lambda _health: {})
    monkeypatch.setattr(doctor, "_native_runtime", lambda _health: {})


def native_runtime(**settings):
    """Return what the doctor says of the native runtime in an environment, and its notes."""
    health = doctor.Health({"torch": {"version": torch.__version__}})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        facts = doctor._native_runtime(health)
    assert not health.problems
    return facts, health.notes


def test_the_native_runtime_is_found_and_not_built(tmp_path):
    folder = tmp_path / "cache"
    facts, notes = native_runtime(OPFORGE_CACHE=str(folder), CXX=toolchain.cxx().path)
    assert facts["library"] == f"it will be built on first use, with {toolchain.cxx().path}, in {folder / 'native'}"
    assert (facts["wanted"], facts["layout"], notes) == (True, [], [])
    assert not list(folder.rglob("*.so"))


@pytest.mark.slow
def test_the_native_runtime_has_its_library_and_its_layout():
    library = building.build()
    facts, notes = native_runtime(OPFORGE_NATIVE="0")
    assert facts["library"] == str(library)
    assert len(facts["layout"]) == 10
    assert not facts["wanted"]
    assert notes == ["OPFORGE_NATIVE=0: kernels are called through Python, which is slower"]


@pytest.mark.slow
def test_without_a_compiler_the_doctor_says_what_to_install(tmp_path):
    facts, (note,) = native_runtime(OPFORGE_CACHE=str(tmp_path), CXX="/nowhere/c++")
    assert facts["library"].startswith("none: CXX names '/nowhere/c++', which is not there; install one")
    assert note.startswith("kernels are called through Python, which is slower: CXX names '/nowhere/c++'")


@pytest.mark.skipif(torch.version.cuda is not None, reason="launch plans may be possible here")
@needs_torch_native
@pytest.mark.slow
def test_torchs_own_overrides_are_listed(tmp_path):
    facts, (note,) = native_runtime(**overriding_relu(tmp_path))
    assert facts["overridden_by_torch"] == ["relu.default (CPU)"]
    assert note.startswith("torch overrides relu.default (CPU) from Python (torch._native)")
    assert facts["launch_plans"] == "none: torch was built without CUDA"


def test_a_native_runtime_that_ends_the_process_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_NATIVE_STATE", (sys.executable, "-c", "import os; os.abort()"))
    health = doctor.Health({"torch": {"version": torch.__version__}})
    assert doctor._native_runtime(health) == {"library": None}
    assert "the native runtime does not work: looking at it ended with exit status -6" in problems(health)


def problems(health):
    return " ".join(f"{p.what} FIX {p.fix}" for p in health.problems)


@pytest.mark.slow
def test_libraries_that_would_break(tmp_path, quick):
    for name in ("one", "two"):
        write(tmp_path / name, registering("STABLE_TORCH_LIBRARY", f"op_{name}"))
    write(tmp_path / "none", ABORTS)
    write(tmp_path / "built", "no library", "x.so")
    said = problems(doctor.examine(tmp_path))
    assert "namespace 'shared' is claimed twice" in said
    assert "FRAGMENT(shared, m)" in said
    assert "none registers no operator in its sources FIX write STABLE_TORCH_LIBRARY" in said
    assert "x.so cannot be loaded: it is not a shared library for this machine" in said


def test_cuda_sources_without_nvcc_or_cuda(tmp_path, quick, monkeypatch):
    write(tmp_path / "lib", registering("STABLE_TORCH_LIBRARY", "x"), "x.cu")
    monkeypatch.setenv("CXX", toolchain.cxx().path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_CUDA_FOLDERS", ())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    said = problems(doctor.examine(tmp_path))
    assert "lib holds CUDA sources, and there is no nvcc FIX install the CUDA toolkit" in said


def test_versions_that_do_not_go_together(quick, monkeypatch):
    health = doctor.Health(
        {"torch": {"cuda": "12.8"}, "compilers": {"nvcc_version": "Cuda compilation tools, release 13.0, V13.0.88"}}
    )
    monkeypatch.setattr(doctor.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        doctor, "_nvidia", lambda _health: {"devices": ["H200"], "driver": "470", "driver_cuda": "11.4"}
    )
    doctor._gpu(health)
    said = problems(health)
    assert "the driver supports CUDA 11.4, and torch needs 12.8 FIX update NVIDIA's driver" in said
    assert "nvcc is of CUDA 13, and torch was built with CUDA 12.8" in said
    bare = doctor.Health({"torch": {"cuda": None}, "compilers": {}})
    doctor._gpu(bare)
    assert "there is a GPU (H200), and torch was built without CUDA FIX install a torch with CUDA" in problems(bare)


def test_a_compiler_that_is_too_old(tmp_path):
    old = tmp_path / "old-c++"
    old.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'c++ 4.8' && exit 0\necho \"c++: error: unrecognized option '-std=c++20'\"\nexit 1\n"
    )
    old.chmod(0o755)
    health = doctor.Health()
    doctor._try_cxx20(health, toolchain.Compiler(str(old), "c++ 4.8"))
    assert "does not build a C++20 program" in problems(health)
    assert "install g++ 11 or newer" in problems(health)


def test_a_compiler_that_cannot_read_torchs_headers(tmp_path):
    """A compiler may build C++20 and still be too old for torch; nvcc before CUDA 12 has no C++20."""
    lacking = compiler(
        tmp_path / "lacking", 'case "$*" in *torch.cpp*) echo "torch.cpp:1:1: error: too old"; exit 1;; esac'
    )
    health = doctor.Health({"torch": {"include": list(toolchain.torch_build().include_folders)}})
    doctor._try_cxx20(health, toolchain.Compiler(str(lacking), "c++ 10"))
    assert "does not build torch's headers: torch.cpp:1:1: error: too old" in problems(health)


def test_a_cuda_toolkit_that_is_too_old(tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    health = doctor.Health()
    doctor._compilers(health)
    assert "has no C++20, which torch's headers need FIX install a CUDA toolkit 12" in problems(health)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "file" / "cache"))
    health = doctor.Health()
    doctor._cache(health)
    assert "FIX set OPFORGE_CACHE" in problems(health)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(["/nowhere"], 2, "there is no folder '/nowhere'"), (["--format", "xml"], 2, "unknown format")],
)
def test_bad_input(words, code, message):
    done = opforge("doctor", *words)
    assert done.returncode == code
    assert message in done.stderr
