"""Modules beside a kernel are its own, and what runs is what the file says now."""

from __future__ import annotations

import contextlib
import io
import os
import py_compile
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import opforge
from opforge.runtime.dispatch import KernelWarning
from tests import native
from tests.conftest import ROOT
from tests.install.proving import RELU, prove

FLOATS = {"float32": {"rank": [0, 4], "numel": [0, 64], "layouts": ["contiguous"], "timed": [[0, 64, True]]}}
AT_ONCE = "from {0} import MARK\ndef relu_kernel_impl(self):\n    return self.clamp(min=0) + MARK\n"
LATER = "def relu_kernel_impl(self):\n    from {0} import MARK\n    return self.clamp(min=0) + MARK\n"


@pytest.fixture
def beside(tmp_path):
    """Return a function that writes a kernel and files beside it."""

    def write(name, source, files):
        folder = tmp_path / name / "relu"
        for path, text in {"relu_implementation_1.py": source, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        prove(tmp_path / name, "relu", {"relu.default": FLOATS})
        return tmp_path / name

    return write


def answer(root):
    """Return what the kernel adds to its answers."""
    with opforge.enabled(root, device="cpu") as made:
        found = torch.relu(torch.zeros(1)).item()
        assert made.counters()["relu.default"]["served"] == 1
    return found


@pytest.mark.parametrize("source", [AT_ONCE, LATER], ids=["at once", "in the function"])
@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("helper", {"helper.py": "MARK = {}\n"}),
        ("common.numbers", {"common/__init__.py": "", "common/numbers.py": "MARK = {}\n"}),
        ("plain.numbers", {"plain/numbers.py": "MARK = {}\n"}),
        ("near", {"near.py": "from far import MARK\n", "far.py": "MARK = {}\n"}),
        (
            "whole.near",
            {"whole/__init__.py": "", "whole/near.py": "from .far import MARK\n", "whole/far.py": "MARK = {}\n"},
        ),
    ],
    ids=["module", "package", "folder", "through another", "relative"],
)
def test_each_kernel_has_its_own_and_the_program_has_its_own(beside, monkeypatch, source, module, files):
    top = module.partition(".")[0]
    theirs = ModuleType(top)
    theirs.MARK = 7
    for mark in (1000, 2000):
        root = beside(
            f"kernels{mark}", source.format(module), {n: t.replace("{}", str(mark)) for n, t in files.items()}
        )
        assert answer(root) == mark
        assert not {"far", top} & set(sys.modules)
        monkeypatch.setitem(sys.modules, top, theirs)
        assert answer(root) == mark
        assert sys.modules[top] is theirs
        monkeypatch.delitem(sys.modules, top)


IMPORTS = {
    "import helper": "helper.MARK",
    "import helper as h, math": "h.MARK * math.floor(1.5)",
    "import common.inner.numbers": "common.inner.numbers.MARK",
    "import common.inner.numbers as n": "n.MARK",
    "from common.inner import numbers as n": "n.MARK",
    "from common.inner.numbers import *": "MARK",
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_every_way_to_import_them(beside, statement):
    source = f"{statement}\ndef relu_kernel_impl(self):\n    return self.clamp(min=0) + {IMPORTS[statement]}\n"
    assert (
        answer(beside("kernels", source, {"helper.py": "MARK = 1000\n", "common/inner/numbers.py": "MARK = 1000\n"}))
        == 1000
    )


LOOKED_UP = """
from __future__ import annotations
import dataclasses, inspect, pickle, sys, typing

MARK = 1000
Number = int

@dataclasses.dataclass
class Kept:
    mark: Number = 0

def mark():
    @dataclasses.dataclass
    class Inner:
        mark: typing.ClassVar[Number] = 5

    assert not dataclasses.fields(Inner)
    assert "class Kept" in inspect.getsource(Kept)
    assert typing.get_type_hints(Kept) == {"mark": int}
    return pickle.loads(pickle.dumps(Kept(sys.modules[__name__].MARK))).mark
"""


def test_what_looks_a_module_up_by_its_name_finds_it(beside, monkeypatch):
    source = "import near\ndef relu_kernel_impl(self):\n    return self.clamp(min=0) + near.mark()\n"
    root = beside("kernels", source, {"near.py": LOOKED_UP})
    monkeypatch.setitem(sys.modules, "near", ModuleType("near"))
    assert answer(root) == 1000


def test_a_file_that_ends_the_process_is_refused_and_loaded_once(beside):
    source = "import sys\nsys.stdout.write('here ')\nsys.exit(3)\n"
    with (
        pytest.warns(KernelWarning, match="raised while loading: SystemExit: 3"),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        made = opforge.enable(beside("kernels", source, {}), device="cpu", policy="all")
    assert len(made.refused) > 1
    assert said.getvalue() == "here "


def test_a_module_that_imports_only_when_it_is_called(beside):
    later = "def mark():\n    from far import MARK\n    return MARK\n"
    source = "import near\ndef relu_kernel_impl(self):\n    return self.clamp(min=0) + near.mark()\n"
    assert answer(beside("kernels", source, {"near.py": later, "far.py": "MARK = 3000\n"})) == 3000


def test_files_beside_a_kernel_do_not_take_the_place_of_torch_or_of_the_standard_library(beside):
    source = (
        "import json, torch\ndef relu_kernel_impl(self):\n    return torch.clamp(self, min=0) + json.loads('1000')\n"
    )
    assert answer(beside("kernels", source, {"torch.py": "", "json.py": ""})) == 1000


def test_what_runs_is_what_the_file_says_though_it_is_as_long_and_as_old_as_before(kernels, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for mark in (1000, 5000, 2000, 3000):
        root = kernels({"relu": RELU}, mark=mark)
        os.utime(root / "relu" / "relu_implementation_1.py", (1_700_000_000, 1_700_000_000))
        prove(root, "relu", {"relu.default": FLOATS})
        assert answer(root) == mark


FOR_A_GPU = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from opforge.runtime.isolated_import import load_file

add, relu = load_file(Path(sys.argv[1])), load_file(Path(sys.argv[2]))
for kernel, pointers, numbers in ((add._same, 3, {"count": "i32", "alpha": "fp32"}), (relu.kernel, 2, {"count": "i32"})):
    types = dict.fromkeys(kernel.arg_names[:pointers], "*bf16") | numbers | {"BLOCK": "constexpr"}
    source = ASTSource(kernel, types, {(kernel.arg_names.index("BLOCK"),): 1024})
    made = triton.compile(source, GPUTarget("cuda", 90, 32))
    print(kernel.__name__, made.asm["ptx"].count(".entry"), len(made.asm["cubin"]) > 0)
"""
TRITON_RELU = """
import triton
import triton.language as tl
from parts import above

@triton.jit
def kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, above(tl.load(source + at, mask=at < count), 0.0), mask=at < count)
"""
TRITON_ABOVE = """
import triton
import triton.language as tl

@triton.jit
def above(x, least):
    return tl.where(x < least, least, x)
"""


@pytest.mark.slow
def test_triton_compiles_for_a_gpu_what_is_loaded_so(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed: nothing can be compiled for a GPU")
    (tmp_path / "parts.py").write_text(TRITON_ABOVE)
    (tmp_path / "relu.py").write_text(TRITON_RELU)
    example = ROOT / "examples" / "triton_kernels" / "add" / "add_implementation_1.py"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.cuda.is_available = lambda: True\n{FOR_A_GPU}", example, tmp_path / "relu.py"],
        env={**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["_same 1 True", "kernel 1 True"], done.stderr


def test_what_is_judged_is_the_source_and_no_bytecode_beside_it(kernel_directory, judge_tiny):
    right = (
        "import torch\nfrom helper import LEAST\ndef relu_kernel_impl(self):\n    return torch.clamp(self, min=LEAST)\n"
    )
    root = kernel_directory({"relu": right})
    helper = root / "relu" / "helper.py"
    helper.write_text("LEAST = 9\n")
    cached = py_compile.compile(str(helper))
    stat = helper.stat()
    helper.write_text("LEAST = 0\n")
    os.utime(helper, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.path.exists(cached)
    ended = judge_tiny(root, {"relu.default": ["((T([3, 4], f32),), {})"]})
    assert {row.verdict for row in ended.store.rows()} == {"passed"}


LIBRARIES = """
import sys, warnings
import torch, opforge
made = opforge.enable(sys.argv[1], device="cpu", policy="all")
print(made.operators)
warnings.simplefilter("ignore")
print(opforge.enable(sys.argv[2], device="cpu", policy="all").refused["relu.default"])
opforge.disable()
print(opforge.enable(sys.argv[1], device="cpu", policy="all").operators == made.operators)
"""


@pytest.mark.slow
def test_a_library_whose_namespace_is_taken_is_refused_and_does_not_end_the_process(tmp_path):
    for name, source in (("one", native.RELU), ("two", native.RELU + "// another one")):
        native.write(tmp_path / name / "relu", source, "relu_implementation_1.cpp")
    command = [sys.executable, "-c", LIBRARIES, str(tmp_path / "one"), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    operators, refused, again = done.stdout.splitlines()
    assert "relu.default" in operators
    assert (
        "has operators in the namespace relu_implementation_1, which another library in this process has already"
        in refused
    )
    assert again == "True"
