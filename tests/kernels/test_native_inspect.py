"""Libraries are looked at in another process: what they add, what they do to a process, which of them clash."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from opforge.errors import OpforgeError
from opforge.kernels import native
from opforge.kernels.native import inspect
from tests.native import ABORTS, CRASHES, NO_OPERATOR, registering, write


def built(folder, source):
    return native.build(native.LibrarySpec.of_file(write(folder, source, f"{folder.name}.cpp"))).library


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return libraries of one namespace: two that claim it, and two that add to it, one of them what the first has."""
    folder = tmp_path_factory.mktemp("shared")
    whole, fragment = "STABLE_TORCH_LIBRARY", "STABLE_TORCH_LIBRARY_FRAGMENT"
    blocks = {"claims": (whole, "x"), "claims_too": (whole, "y"), "adds": (fragment, "z"), "adds_x": (fragment, "x")}
    return {name: built(folder / name, registering(*block)) for name, block in blocks.items()}


def test_what_a_library_adds(shared):
    claims, adds = native.inspect_libraries([[shared["claims"]], [shared["adds"]]])
    assert claims.operators == {"shared::x": "shared::x(Tensor self) -> Tensor"}
    assert (claims.claimed_namespaces, adds.claimed_namespaces) == (("shared",), ())
    assert not claims.error


@pytest.mark.slow
def test_libraries_that_end_the_process(tmp_path, shared):
    groups = [
        [built(tmp_path / "a", ABORTS)],
        [built(tmp_path / "c", CRASHES)],
        [shared["claims"], shared["claims_too"]],
    ]
    aborts, crashes, both = native.inspect_libraries(groups)
    assert "dies of SIGABRT" in aborts.error
    assert "dies of SIGSEGV" in crashes.error
    assert both.died


@pytest.mark.slow
def test_a_library_that_hangs_is_ended(tmp_path, monkeypatch):
    waits = "#include <unistd.h>\n__attribute__((constructor)) static void begin() { sleep(300); }\n"
    short = "import opforge.kernels.native.inspect_child as c\nc._LIMIT_S = 1.0\nc.main()"
    monkeypatch.setattr(inspect, "CHILD_COMMAND", (sys.executable, "-P", "-c", short))
    (hung,) = native.inspect_libraries([[built(tmp_path / "h", waits)]])
    assert hung.error == "loading it hangs"


@pytest.mark.slow
def test_a_library_that_registers_nothing(tmp_path):
    (nothing,) = native.inspect_libraries([[built(tmp_path / "n", NO_OPERATOR)]])
    assert (nothing.operators, nothing.error) == ({}, "")


def test_a_second_look_needs_no_process(shared, monkeypatch):
    first = native.inspect_libraries([[shared["claims"]]])
    monkeypatch.setattr(inspect, "CHILD_COMMAND", ("/nowhere",))
    assert native.inspect_libraries([[shared["claims"]]]) == first


def test_clashes_among_libraries(shared):
    claims, too, adds, adds_x = native.inspect_libraries([[path] for path in shared.values()])
    (claimed,) = native.clashes_of_libraries([claims, too])
    for words in (
        "namespace 'shared' is claimed twice",
        str(shared["claims"]),
        str(shared["claims_too"]),
        "FRAGMENT(shared, m)",
    ):
        assert words in str(claimed)
    (defined,) = native.clashes_of_libraries([claims, adds_x])
    assert "operator shared::x is defined twice" in str(defined)
    assert native.clashes_of_libraries([claims, adds]) == []
    assert native.clashes_of_libraries([adds, too]) == []


@pytest.mark.slow
def test_loading_never_ends_the_process(shared):
    """Load one after another what would end this process, in a process of its own all the same."""
    code = f"""
from pathlib import Path
from opforge.kernels import native
print(*native.load(Path({str(shared["adds"])!r})), *native.load(Path({str(shared["claims"])!r})), *native.load(Path({str(shared["claims"])!r})))
for path in ({str(shared["claims_too"])!r}, {str(shared["adds_x"])!r}):
    try:
        native.load(Path(path))
    except native.ClashError as error:
        print(error)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "shared::z shared::x", done.stderr
    assert "namespace 'shared' is claimed twice: by claims.cpp:5 and by" in lines[1]
    assert "operator shared::x is defined twice: in claims.cpp:5 and in" in lines[2]
    assert lines[3] == "alive"


@pytest.mark.slow
def test_a_namespace_of_torchs_own_is_taken(tmp_path):
    (look,) = native.inspect_libraries([[built(tmp_path / "p", registering("STABLE_TORCH_LIBRARY", "x", "prims"))]])
    assert look.died


@pytest.mark.slow
def test_no_library(tmp_path):
    with pytest.raises(OpforgeError, match="there is no library"):
        native.inspect_libraries([[tmp_path / "nothing.so"]])
    (tmp_path / "text.so").write_text("no ELF")
    (look,) = native.inspect_libraries([[tmp_path / "text.so"]])
    assert "not a shared library for this machine" in look.error


def test_symbols_are_shown_as_in_the_source():
    symbol = "_ZN2at4_ops3add4callERKNS_6TensorES4_RKN3c106ScalarE"
    error = f"x.so: undefined symbol: {symbol}"
    explained = inspect.explain_load_error(Path("x.so"), error)
    assert (
        "for another torch: at::_ops::add::call(at::Tensor const&, at::Tensor const&, c10::Scalar const&)" in explained
    )
    assert [inspect.demangled(name) for name in ("aoti_torch_zeros", "_Znothing")] == ["aoti_torch_zeros", "_Znothing"]


@pytest.mark.slow
def test_built_for_another_python_or_torch(tmp_path):
    of_python = 'extern "C" int PyOld_Function();\nint call() { return PyOld_Function(); }\n'
    of_torch = "namespace c10 { void gone(int); }\nvoid call() { c10::gone(1); }\n"
    python, torch = native.inspect_libraries([[built(tmp_path / "p", of_python)], [built(tmp_path / "t", of_torch)]])
    assert "built for another Python: PyOld_Function is not in this one" in python.error
    assert "built for another torch: c10::gone(int) is not in this one" in torch.error
    other = tmp_path / "m.cpython-39-x86_64-linux-gnu.so"
    other.write_bytes(built(tmp_path / "p", of_python).read_bytes())
    (named,) = native.inspect_libraries([[other]])
    assert (
        f"built for another Python (cpython-39-x86_64-linux-gnu, and this one is {sysconfig.get_config_var('SOABI')})"
        in named.error
    )
