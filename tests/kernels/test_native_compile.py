"""Sources become libraries: once for each content, whole or not at all, with the compiler's words when they do not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from opforge.errors import OpforgeError
from opforge.kernels import native
from opforge.kernels.native import toolchain
from tests.native import DOES_NOT_COMPILE, NO_OPERATOR, compiler, write

BUILD = "import sys\nfrom pathlib import Path\nfrom opforge.kernels import native\nprint(native.build(native.LibrarySpec.of_file(Path(sys.argv[1]))).cached)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    toolchain.torch_build()  # from the cache that all tests share
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Have a compiler that takes its time and notes each call; returns a function that counts them."""
    log = tmp_path / "calls"
    log.touch()
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "slow-c++", f"echo x >> {log}; sleep 0.3")))
    return lambda: len(log.read_text().split())


def unit(file):
    return native.LibrarySpec.of_file(file)


def test_a_second_build_takes_the_first_ones_library(tmp_path, logged):
    file = write(tmp_path / "a", NO_OPERATOR)
    first, second = native.build(unit(file)), native.build(unit(file))
    assert (first.cached, second.cached) == (False, True)
    assert first.library == second.library
    assert logged() == 2  # to compile and to link
    copy = write(tmp_path / "b", NO_OPERATOR)
    assert native.build(unit(copy)).library == first.library


@pytest.mark.parametrize("what", ["source", "header", "header elsewhere", "flags", "namespace", "target"])
def test_what_a_library_depends_on_makes_another(tmp_path, what):
    file = write(tmp_path / "a", '#include "beside.h"\n#include "../elsewhere.h"\nint x = BESIDE + ELSEWHERE;\n')
    write(tmp_path / "a", "#define BESIDE 1\n", "beside.h")
    write(tmp_path, "#define ELSEWHERE 1\n", "elsewhere.h")
    before = native.build(unit(file))
    assert native.build(unit(file)).cached
    changed = {}
    match what:
        case "source":
            file.write_text(file.read_text() + "int y;\n")
        case "header":
            write(tmp_path / "a", "#define BESIDE 2\n", "beside.h")
        case "header elsewhere":
            write(tmp_path, "#define ELSEWHERE 2\n", "elsewhere.h")
        case _:
            changed = {
                "flags": {"flags": ("-DZ=1",)},
                "namespace": {"namespace": "n"},
                "target": {"oldest_torch": "2.12"},
            }[what]
    after = native.build(native.LibrarySpec("source", (file,), file.parent, **changed))
    assert not after.cached
    assert after.library != before.library


@pytest.mark.slow
def test_two_builds_of_one_source_at_once_build_once(tmp_path, logged):
    file = write(tmp_path / "a", NO_OPERATOR)
    both = [
        subprocess.Popen([sys.executable, "-c", BUILD, str(file)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert sorted(one.communicate()[0].strip() for one in both) == ["False", "True"]
    assert logged() == 2


@pytest.mark.slow
def test_a_build_that_is_killed_leaves_nothing_that_counts(tmp_path, own_cache, monkeypatch):
    file = write(tmp_path / "a", NO_OPERATOR)
    begun = tmp_path / "begun"
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(compiler(tmp_path / "c++", f"touch {begun}; sleep 30")))
        process = subprocess.Popen([sys.executable, "-c", BUILD, str(file)], start_new_session=True)
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = [path.name for path in own_cache.iterdir() if path.is_dir()]
        assert left
        assert all(name.startswith(".") for name in left)
        assert not list(own_cache.glob("*/*.so"))
        compiler(tmp_path / "c++", ":")
        assert not native.build(unit(file)).cached
    assert not [path for path in own_cache.iterdir() if path.is_dir() and path.name.startswith(".")]


def test_a_source_that_does_not_compile_is_told_with_file_and_line(tmp_path, own_cache):
    with pytest.raises(native.BuildError) as caught:
        native.build(unit(write(tmp_path / "a", DOES_NOT_COMPILE, "broken.cpp")))
    error = caught.value
    assert error.first_error.startswith("broken.cpp:2:11: error: 'three' was not declared")
    assert str(error).startswith("broken cannot be built: broken.cpp:2:11: error:")
    assert "\n" not in error.reason
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


def test_a_flood_of_errors_is_bounded(tmp_path):
    source = "".join(f"int a{n} = missing_{n};\n" for n in range(500))
    with pytest.raises(native.BuildError) as caught:
        native.build(unit(write(tmp_path / "a", source)))
    assert len(str(caught.value)) < 5000
    assert "more lines" in str(caught.value)


def test_an_error_of_the_linker_is_told(tmp_path):
    a = write(tmp_path / "a", "int twice() { return 1; }\n", "one.cpp")
    b = write(tmp_path / "a", "int twice() { return 2; }\n", "two.cpp")
    with pytest.raises(native.BuildError, match="multiple definition"):
        native.build(native.LibrarySpec("both", (a, b), a.parent))


def test_a_compiler_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "c++", "kill -KILL $$")))
    with pytest.raises(native.BuildError, match=r"died of SIGKILL.*out of memory"):
        native.build(unit(write(tmp_path / "a", NO_OPERATOR)))


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    child = tmp_path / "child"
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "c++", f"sleep 300 & echo $! > {child}; wait")))
    with pytest.raises(native.BuildError, match="did not finish within 1 s"):
        native.build(unit(write(tmp_path / "a", NO_OPERATOR)), limit_s=1.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(child.read_text()))
        left.status() == psutil.STATUS_ZOMBIE or left.wait(timeout=10)


def test_there_is_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(OpforgeError, match="CXX names '/nowhere/c\\+\\+', which is not there; install one"):
        native.build(unit(write(tmp_path / "a", NO_OPERATOR)))


def test_there_is_no_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", toolchain.cxx().path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_CUDA_FOLDERS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(OpforgeError, match=r"needs CUDA's compiler, nvcc.*install the CUDA toolkit"):
        native.build(unit(write(tmp_path / "a", NO_OPERATOR, "source.cu")))


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(native.BuildError, match="cannot be read"):
        native.build(unit(tmp_path / "gone.cpp"))


def test_a_target_that_is_no_version(tmp_path):
    file = write(tmp_path / "a", NO_OPERATOR)
    with pytest.raises(OpforgeError, match="'two' is not a version of torch"):
        native.build(native.LibrarySpec("source", (file,), file.parent, oldest_torch="two"))


@pytest.mark.parametrize(
    ("listed", "flags"),
    [
        ("9.0", ["-gencode=arch=compute_90,code=sm_90"]),
        ("8.0;9.0a+PTX", ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90a,code=compute_90a"]),
    ],
)  # fmt: skip
def test_architectures_as_torch_names_them(listed, flags, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    toolchain.cuda_architectures.cache_clear()
    try:
        assert toolchain.cuda_architecture_flags() == flags
    finally:
        toolchain.cuda_architectures.cache_clear()


def test_an_architecture_that_is_none(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "hopper")
    toolchain.cuda_architectures.cache_clear()
    with pytest.raises(OpforgeError, match="TORCH_CUDA_ARCH_LIST holds 'hopper'"):
        toolchain.cuda_architectures()
