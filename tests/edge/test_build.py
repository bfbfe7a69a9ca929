"""Libraries of kernels: both tools build them, selection leaves the rest out, and errors are explained."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opforge.edge import toolchain
from opforge.edge.bindings import BindingError, Selection, select_all
from opforge.edge.build import (
    SOURCE_NAME,
    GeneratedCode,
    _key,
    build,
    check_registration,
    generate_registration,
    library_product,
    read_folder,
)
from opforge.edge.elf import loaded_bytes, machine
from opforge.edge.toolchain import BuildOptions
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels.native.compiler import BuildError
from tests.command import opforge
from tests.edge import folders


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "two", "mul3", "also3")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "one", "mul3")


def symbols(library: Path) -> str:
    return subprocess.run(["nm", "-C", str(library)], capture_output=True, text=True, check=True).stdout


def stripped(library: Path) -> bytes:
    """Return a library's bytes without its names: that of each source file stays in it otherwise."""
    bare = library.with_suffix(".bare")
    subprocess.run(["strip", "-o", str(bare), str(library)], check=True)
    return bare.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("tool", toolchain.TOOLS)
def test_a_library_has_what_is_selected_and_nothing_of_the_rest(folder, tool):
    opened = read_folder(folder)
    both = build(opened, select_all(opened.entries), options=BuildOptions(tool))
    assert both.operators == ("my_ops::mul3.out", "my_ops::also3.out")
    assert "my_ops::native::also3_out" in symbols(both.library)
    (folder / "ops.py").unlink()  # it is for exports, and importing it takes seconds
    done = opforge("edge", "build", str(folder), "--ops", "mul3", "--out", str(folder / "one"), "--with", tool)
    assert done.returncode == 0, done.stderr
    one = folder / "one" / both.library.name
    first, *rest = done.stdout.splitlines()
    assert first.startswith(
        f"{one}  {one.stat().st_size} bytes ({loaded_bytes(one)} of code and data), {tool}, built in "
    )
    assert rest == ["registers  my_ops::mul3.out (named)", "left out   my_ops::also3.out"]
    assert "my_ops::native::mul3_out" in symbols(one)
    assert "also3" not in symbols(one)
    assert b"also3" not in stripped(one)
    assert one.stat().st_size < both.bytes
    assert loaded_bytes(one) < both.loaded_bytes


@pytest.mark.slow
def test_a_library_is_compiled_once_for_each_content(single):
    (single / "kernels" / "common.h").write_text("#define FACTOR 3\n")
    source = single / "kernels" / "mul3.cpp"
    source.write_text('#include "common.h"\n' + source.read_text())
    opened = read_folder(single)
    built = [build(opened, select_all(opened.entries)).cached for _ in range(2)]
    assert built == [False, True]
    (single / "kernels" / "common.h").write_text("#define FACTOR 4\n")
    assert not build(opened, select_all(opened.entries)).cached
    (single.parent / "outside.h").write_text("#define FACTOR 5\n")
    source.write_text(source.read_text().replace("common.h", "../../outside.h"))
    made = single / "build" / "generated"
    product = library_product(opened, GeneratedCode(made / SOURCE_NAME, made, ()))
    assert _key(opened, product, BuildOptions()) is None, (
        "what lies outside the folder may change unseen: it is never kept"
    )


@pytest.mark.slow
def test_a_kernel_name_without_its_kernel_is_named(single):
    (single / "kernels" / "mul3.cpp").write_text(folders.kernel("other", folders.RIGHT))
    opened = read_folder(single)
    with pytest.raises(BuildError) as caught:
        build(opened, select_all(opened.entries))
    assert "binds my_ops::mul3.out to kernel_name my_ops::mul3_out" in caught.value.first_error
    assert "no source in kernels/ defines my_ops::native::mul3_out" in caught.value.first_error
    assert not (single / "build" / "one_kernels.so").exists()


@pytest.mark.slow
def test_a_kernel_without_the_context_is_not_the_one_that_is_called(single):
    source = single / "kernels" / "mul3.cpp"
    source.write_text(
        folders.HEAD + "namespace my_ops::native { Tensor& mul3_out(const Tensor& x, Tensor& out) { return out; } }\n"
    )
    opened = read_folder(single)
    with pytest.raises(BuildError, match="a KernelRuntimeContext& first"):
        build(opened, select_all(opened.entries))


def test_a_source_that_does_not_compile_is_named_with_its_line(single):
    (single / "kernels" / "mul3.cpp").write_text("int one = 1;\nint two = three;\n")
    opened = read_folder(single)
    with pytest.raises(BuildError, match=r"mul3.cpp:2:11: error: .*three"):
        build(opened, select_all(opened.entries))


def test_what_the_generator_leaves_out_is_noticed(folder):
    with pytest.raises(BindingError, match=r"my_ops::mul33.out is selected, and .* has no entry"):
        generate_registration(
            folder / "ops.yaml", Selection(("my_ops::mul3.out", "my_ops::mul33.out"), "test"), folder / "made"
        )
    with pytest.raises(NothingToJudgeError, match="no operator"):
        generate_registration(folder / "ops.yaml", Selection((), "test"), folder / "made")


@pytest.mark.slow
def test_a_schema_that_differs_from_the_registered_one_is_shown_with_both(folder):
    assert check_registration(read_folder(folder))
    text = (folder / "ops.yaml").read_text()
    (folder / "ops.yaml").write_text(text.replace("mul3.out(Tensor x,", "mul3.out(Tensor x, int n,"))
    done = opforge("edge", "build", str(folder))
    assert done.returncode == 1
    assert "my_ops::mul3.out has one schema in ops.yaml and another where it is registered" in done.stderr
    assert "Tensor x, int n, *" in done.stderr


@pytest.mark.slow
def test_an_entry_that_nothing_registers_is_named(folder):
    (folder / "ops.py").write_text(
        'from opforge.edge.define import define\ndefine("my_ops::mul3(Tensor x) -> Tensor", lambda x: x * 3)\n'
    )
    with pytest.raises(OpforgeError, match=r"binds my_ops::also3.out, and ops.py does not register it"):
        check_registration(read_folder(folder))


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "executorch" else real(name, *rest)
    )
    with pytest.raises(OpforgeError, match=r'pip install "opforge\[executorch\]"'):
        toolchain.find_executorch()


def test_a_missing_compiler_and_a_missing_cmake_are_named(folder, monkeypatch, tmp_path):
    opened = read_folder(folder)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(OpforgeError, match="CXX names 'no-such-compiler'"):
            build(opened, select_all(opened.entries))
    monkeypatch.setattr(toolchain, "_program", lambda _name: None)
    with pytest.raises(OpforgeError, match="pip install cmake"):
        build(opened, select_all(opened.entries), options=BuildOptions("cmake"))
    with pytest.raises(OpforgeError, match="unknown build tool 'make'"):
        build(opened, select_all(opened.entries), options=BuildOptions("make"))


def test_kernels_of_their_own_for_dtypes_have_keys_as_the_runtime_makes_them(single):
    (single / "ops.yaml").write_text(folders.SPECIALIZED)
    made = generate_registration(single / "ops.yaml", Selection(("my_ops::mul3.out",), "test"), single / "made")
    keys = re.findall(r'"v1/(.*)"', made.source.read_text())
    assert sorted(keys) == ["3;0,1|3;0,1|3;0,1", "4;0,1|4;0,1|4;0,1", "6;0|6;0|6;0"], "the result is the last one again"
    calls = re.findall(r"my_ops::native::(\w+)\(context", made.source.read_text())
    assert sorted(calls) == ["mul3_integers", "mul3_integers", "mul3_out", "mul3_row"]
    header = (single / "made" / "NativeFunctions.h").read_text()
    assert all(f" {name}(torch::executor::KernelRuntimeContext" in header for name in set(calls))


TOOLCHAIN = """set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_CXX_COMPILER {compiler})
"""


@pytest.mark.slow
def test_a_toolchain_file_says_what_compiles_and_for_what(single):
    (single / "ops.py").unlink()
    here = single / "here.cmake"
    here.write_text(TOOLCHAIN.format(machine=platform.machine(), compiler=shutil.which("c++")))
    done = opforge("edge", "build", str(single), "--toolchain", str(here), "--out", str(single / "out"))
    assert done.returncode == 0, done.stderr
    library = single / "out" / "one_kernels.so"
    assert machine(library) == platform.machine()
    assert ", cmake, built in " in done.stdout
    assert "my_ops::native::mul3_out" in symbols(library)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or platform.machine() == "aarch64", reason="no cross compiler"
)
def test_libraries_for_another_machine_are_asked_for(single):
    (single / "ops.py").unlink()
    there = single / "there.cmake"
    there.write_text(TOOLCHAIN.format(machine="aarch64", compiler="aarch64-linux-gnu-g++"))
    done = opforge("edge", "build", str(single), "--toolchain", str(there))
    assert done.returncode == 1
    assert "give the target's ExecuTorch package with --executorch" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ops", "mul3", "--model", "m.pte"), "give one of them"),
        (("--ops", ","), "--ops is empty"),
        (("--ops", "mul33"), "unknown operator 'mul33'"),
        (("--with", "make"), "allowed: direct, cmake"),
        (("--format", "xml"), "allowed: text, json"),
        (("--toolchain", "none.cmake"), "there is no toolchain file 'none.cmake'"),
        (("--executorch", "arm"), "needs --toolchain FILE"),
        (("--toolchain", __file__, "--executorch", "arm"), "'arm' is not an ExecuTorch package"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(folder, words, said):
    done = opforge("edge", "build", str(folder), *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_command_makes_a_folder_that_can_be_built(tmp_path):
    made = tmp_path / "made"
    done = opforge("edge", "init", str(made), "--namespace", "own_ops", "--op", "scale", "--op", "shift")
    assert done.returncode == 0, done.stderr
    first, *files, last = done.stdout.splitlines()
    assert first == f"made {made}, {len(files)} files:"
    assert sorted(map(str.strip, files)) == sorted(
        str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()
    )
    assert last == f"next: opforge edge check {made}"
    assert [entry.name for entry in read_folder(made).entries] == ["own_ops::scale.out", "own_ops::shift.out"]
    assert "is there already" in opforge("edge", "init", str(made)).stderr


def test_a_folder_that_is_none_says_what_makes_one(tmp_path):
    with pytest.raises(OpforgeError, match="opforge edge init"):
        read_folder(tmp_path / "none")
    bare = folders.make(tmp_path / "bare", "mul3")
    (bare / "kernels" / "mul3.cpp").unlink()
    with pytest.raises(OpforgeError, match="no C\\+\\+ source"):
        read_folder(bare)
