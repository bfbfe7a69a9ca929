"""The library of the native runtime: what it needs, and what happens where it cannot be had."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import pytest
import torch

import opforge
from opforge import cache
from opforge.runtime import enabling
from opforge.runtime.dispatch import PythonSlot
from opforge.runtime.native import binding, building, torch_layout
from tests import native as cpp
from tests.install.proving import RELU, marked, prove

ROW = {"rank": [1, 1], "numel": [1, 16], "layouts": ["contiguous"], "timed": [[1, 16, True]]}


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch, tmp_path_factory):
    """Have libraries built, also in a checkout that has prebuilt ones."""
    monkeypatch.setattr(building, "PREBUILT", tmp_path_factory.mktemp("prebuilt"))


@pytest.fixture
def enabled_once(kernels, monkeypatch):
    """Return a function that enables a kernel as a new process would, and returns the warnings."""
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": ROW}})

    def enable():
        monkeypatch.setattr(binding, "_loaded", [])
        monkeypatch.setattr(enabling, "_warnings_given", set())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with opforge.enabled(root, device="cpu"):
                    assert isinstance(enabling._slots["relu.default", "CPU"], PythonSlot)
                    assert marked(torch.relu(torch.ones(4)))
        return [str(warning.message) for warning in said]

    return enable


def test_it_needs_neither_python_nor_cuda():
    dynamic = subprocess.run(["readelf", "-d", building.build()], capture_output=True, text=True, check=True).stdout
    needed = [line.partition("[")[2].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert {"libtorch_cpu.so", "libc10.so"} <= set(needed)
    assert not [name for name in needed if "python" in name or "cuda" in name]


def test_it_is_in_the_cache_of_opforge():
    assert building.cache_folder() == cache.root() / "native"


def test_without_a_compiler_calls_go_through_python_and_one_line_says_so(enabled_once, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    (said,) = enabled_once()
    assert said == (
        "kernels are called through Python, which is slower: CXX names 'no-such-compiler', which is not there; "
        "install one (`apt install g++`), or set CXX to its path; OPFORGE_NATIVE=0 is for no warning"
    )


def test_a_build_that_fails_is_not_tried_again(enabled_once, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    failing = cpp.compiler(tmp_path / "c++", f"echo compiled >> {log}; echo 'slot.h:1: error: no room' >&2; exit 1")
    monkeypatch.setenv("CXX", str(failing))
    (said,) = enabled_once()
    assert "building the native runtime failed with exit status 1: slot.h:1: error: no room" in said
    (said,) = enabled_once()
    assert "error: no room; delete" in said
    assert log.read_text() == "compiled\n"
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_library_that_ends_the_process_ends_only_its_self_test(enabled_once, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    source = cpp.write(tmp_path, cpp.ABORTS)
    other = f'while [ "$1" != -o ]; do shift; done; exec c++ -shared -fPIC {source} -o "$2"'
    monkeypatch.setenv("CXX", str(cpp.compiler(tmp_path / "c++", other)))
    (said,) = enabled_once()
    assert "its self-test failed with exit status -6" in said
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_an_unknown_layout_or_another_torch_is_not_used(enabled_once, monkeypatch):
    path = building.build()
    monkeypatch.setattr(building, "build", lambda: path)
    monkeypatch.setattr(binding, "build", lambda: path)
    monkeypatch.setattr(torch_layout, "KNOWN_LAYOUTS", {"1.0": (1, 2, 3)})
    (said,) = enabled_once()
    assert f"the layout of torch {torch.__version__} is not known (" in said
    monkeypatch.undo()
    abi = binding.ABI
    monkeypatch.setattr(binding, "ABI", 0)
    with pytest.raises(building.NativeError, match=f"has functions of version {abi}, not 0; delete it"):
        binding.NativeLibrary(path)


def test_a_library_of_another_torch_is_not_used(monkeypatch):
    path = building.build()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with pytest.raises(building.NativeError, match=r"was built for torch 2\.\d+\.\d+, and this is 2\.99\.0"):
        binding.NativeLibrary(path)


def test_a_nightly_build_of_torch_fits_the_version_in_its_headers(monkeypatch):
    """Headers have no suffix. The file's name has the commit of torch, so another night's library is not taken."""
    library, path, numbers = binding.load(), building.build(), torch.__version__.partition("+")[0]
    for suffix in (".dev20261101+cpu", "a0+gitcf30153", "rc1"):
        monkeypatch.setattr(torch, "__version__", numbers + suffix)
        library._check_fit(path)


def test_a_cache_that_cannot_be_reached_is_a_reason_to_go_through_python(enabled_once, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / ("long" * 100)))
    (said,) = enabled_once()
    assert "cannot be used (File name too long); set OPFORGE_CACHE to a folder of yours" in said


def test_without_a_home_the_cache_must_be_named(monkeypatch):
    for variable in ("OPFORGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", _no_home)
    with pytest.raises(building.NativeError, match="no home folder; set OPFORGE_CACHE"):
        building.build()


def _no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.slow
def test_a_compiler_without_a_version_is_tried(enabled_once, monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    silent = tmp_path / "c++"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    (said,) = enabled_once()
    assert "its self-test failed" in said


def test_it_can_be_switched_off(enabled_once, monkeypatch):
    monkeypatch.setenv(enabling.NATIVE_VARIABLE, "0")
    assert enabled_once() == []
