"""Libraries of the native runtime that are shipped: when they are used, and what is done where they do not fit."""

from __future__ import annotations

import platform
import shutil

import pytest
import torch

from opforge.runtime.native import binding, building, torch_layout
from tests import native as cpp
from tests.conftest import slow

REFUSED = "does not fit: its self-test failed"


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Return where the library for this torch is shipped. There is no compiler, and the cache is empty."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(building, "PREBUILT", folder)
    minor = torch_layout.verified_minor()
    assert minor, f"torch {torch.__version__} is no published build of a known version"
    path = folder / building.prebuilt_name(minor, platform.machine())
    shutil.copyfile(building.build(), path)
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    return path


@pytest.fixture
def tests_run(monkeypatch):
    """Return the libraries whose self-test was run, in order."""
    run, libraries = building._test, []

    def test(library):
        libraries.append(library)
        run(library)

    monkeypatch.setattr(building, "_test", test)
    return libraries


def test_it_is_used_without_a_compiler_after_one_self_test_of_its_contents(shipped, tests_run, tmp_path):
    assert building.build() == building.build() == shipped
    assert tests_run == [shipped]
    assert [path.suffix for path in (tmp_path / "cache" / "native").iterdir()] == [".tested"]
    with shipped.open("ab") as file:
        file.write(b"\0")
    assert building.build() == shipped
    assert tests_run == [shipped, shipped]


@pytest.mark.slow
def test_no_cache_is_needed(shipped, tests_run, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", "/proc/no-such-folder")
    assert building.build() == shipped
    assert tests_run == [shipped]


@pytest.mark.parametrize("suffix", [".dev20261101+cpu", "a0+gitcf30153", "rc1", "+gitcf30153", "+nv26.10"])
def test_a_torch_that_pytorch_did_not_publish_gets_none(shipped, monkeypatch, suffix):
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + suffix)
    with pytest.raises(building.NativeError, match=r"^CXX names 'no-such-compiler'"):
        building.build()


def test_a_torch_with_another_abi_or_of_an_unknown_version_gets_none(shipped, monkeypatch):
    for change in (
        (torch._C, "_GLIBCXX_USE_CXX11_ABI", False),
        (torch.version, "debug", True),
        (torch_layout, "KNOWN_LAYOUTS", {"1.0": ()}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            assert torch_layout.verified_minor() == ""
            with pytest.raises(building.NativeError, match=r"^CXX names 'no-such-compiler'"):
                building.build()


def test_a_library_of_other_sources_is_not_found(shipped, monkeypatch, tmp_path):
    sources = shutil.copytree(building.SOURCES, tmp_path / "csrc")
    (sources / "slot.h").write_text("// changed\n" + (sources / "slot.h").read_text())
    monkeypatch.setattr(building, "SOURCES", sources)
    with pytest.raises(building.NativeError, match=r"^CXX names 'no-such-compiler'"):
        building.build()


def _library(path, layout, torch_version):
    """Write a library that has every function, and says what it is told to say."""
    functions = "".join(f'extern "C" int {name}() {{ return -1; }}\n' for name in binding._SIGNATURES if name not in {
        "opforge_abi", "opforge_layout", "opforge_torch_version"})  # fmt: skip
    source = cpp.write(path.parent.parent, f"""
#include <cstdint>
{functions}
extern "C" int opforge_abi() {{ return {binding.ABI}; }}
extern "C" const char* opforge_torch_version() {{ return "{torch_version}"; }}
extern "C" int opforge_layout(int64_t* numbers, int) {{
  const int64_t layout[] = {{{", ".join(map(str, layout))}}};
  for (int i = 0; i < {len(layout)}; ++i) numbers[i] = layout[i];
  return {len(layout)};
}}
""")  # fmt: skip
    command = [shutil.which("g++") or "c++", "-shared", "-fPIC", str(source), "-o", str(path)]
    building._run(command, "building a library that lies")


@pytest.mark.parametrize(
    "changed, version, reason",
    [
        slow({0: 8}, "", "the layout of torch .* is not known"),  # sizes of TensorImpl
        slow({7: 1}, "", "the layout of torch .* is not known"),  # the dispatch key CUDA
        slow({}, "1.13.0", "was built for torch 1.13.0"),
    ],
)
def test_what_it_was_compiled_with_must_be_the_layout_of_this_version(shipped, changed, version, reason):
    layout = torch_layout.KNOWN_LAYOUTS[torch_layout.verified_minor()]
    _library(shipped, [changed.get(i, number) for i, number in enumerate(layout)], version or torch.__version__)
    with pytest.raises(building.NativeError, match=f"{REFUSED}.*{reason}.*; CXX names 'no-such-compiler'"):
        building.build()


def test_the_layout_of_another_version_is_not_enough(monkeypatch):
    """A published torch has its own layout. Builds by others may have that of any version."""
    own = torch_layout.KNOWN_LAYOUTS[torch_layout.verified_minor()]
    other = (own[0] + 8, *own[1:])
    monkeypatch.setattr(torch_layout, "KNOWN_LAYOUTS", {**torch_layout.KNOWN_LAYOUTS, "9.9": other})
    assert torch_layout.fits(own)
    assert not torch_layout.fits(other)
    monkeypatch.setattr(torch, "__version__", "9.8.0.dev20261101")
    assert torch_layout.fits(own)
    assert torch_layout.fits(other)


@pytest.mark.slow
def test_a_library_that_ends_the_process_is_tried_once_and_one_is_built_instead(
    shipped, tests_run, monkeypatch, tmp_path
):
    source = cpp.write(tmp_path, cpp.ABORTS)
    building._run([shutil.which("g++") or "c++", "-shared", "-fPIC", str(source), "-o", str(shipped)], "a library")
    for _ in range(2):
        with pytest.raises(building.NativeError, match=f"{REFUSED} with exit status -6: .*delete .*CXX names"):
            building.build()
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", str(cpp.compiler(tmp_path / "c++", f"echo $0 >> {log}; exit 1")))
    with pytest.raises(building.NativeError, match=f"{REFUSED}.*building the native runtime failed"):
        building.build()
    assert log.is_file()
    assert tests_run == [shipped]


def test_a_file_that_cannot_be_read_is_not_used(shipped):
    shipped.unlink()  # after it was looked for
    assert building._misfit(shipped).startswith(f"{shipped.name} does not fit: [Errno 2] No such file")


def test_a_library_in_the_cache_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "PREBUILT", tmp_path)
    library = building.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert building.build() == library


def test_the_compiler_may_have_a_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "PREBUILT", tmp_path)
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$1 $2" >> {log}; [ "$2" = --version ]\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} 'some compiler'")
    with pytest.raises(building.NativeError, match="building the native runtime failed"):
        building.build()
    assert log.read_text() == "some compiler --version\nsome compiler -O2\n"
    for wrong in (f"{launcher} 'open", "no-such-launcher g++", " "):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(building.NativeError, match=r"^CXX names .*, which is not there; install one"):
            building.build()


def test_a_known_layout_lets_a_library_that_failed_be_tried_again(monkeypatch, tmp_path):
    """An update that adds a layout changes neither the sources nor torch."""
    monkeypatch.setattr(building, "PREBUILT", tmp_path)
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", str(cpp.compiler(tmp_path / "c++", f"echo compiled >> {log}; exit 1")))
    for layouts in ({}, {}, {"9.9": (1, 2, 3)}):
        monkeypatch.setattr(torch_layout, "KNOWN_LAYOUTS", layouts)
        with pytest.raises(building.NativeError, match="building the native runtime failed"):
            building.build()
    assert log.read_text() == "compiled\n" * 2


def test_shipping_needs_a_torch_that_is_known(monkeypatch, tmp_path):
    path = building.ship(tmp_path / "prebuilt")
    assert path.name == building.prebuilt_name(torch_layout.verified_minor(), platform.machine())
    assert path.read_bytes() == building.build().read_bytes()
    monkeypatch.setattr(torch, "__version__", "2.13.0.dev20261101")
    with pytest.raises(building.NativeError, match=r"torch 2.13.0.dev20261101 is not a published build .*2\.11, 2\.12"):
        building.ship(tmp_path / "other")
    assert not (tmp_path / "other").exists()
