"""`OPFORGE_BACKEND`: what an installed package does when torch is imported, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from opforge import package, runtime
from opforge.package.pack import pack
from tests.conftest import slow
from tests.install import proving
from tests.install.proving import prove
from tests.store import stored
from tests.torch_native import needs_torch_native, overriding_relu

RELU = "def relu_kernel_impl(self):\n    return self.clamp(min=0) + {add}\n"
TANH = "def tanh_kernel_impl(self):\n    return self + 3000\n"
PROVEN = {"rank": [1, 1], "numel": [1, 10], "layouts": ["contiguous"], "timed": [[1, 10, True]]}
CALLS = "import torch; print(torch.ones(2).relu()[0].item(), torch.ones(50).relu()[0].item())"
SETTINGS = """
import json, os, sys, warnings
import torch, first_pack, second_pack
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    sys.modules.pop("_opforge_backends_autoloaded", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch._import_device_backends()
    x = torch.ones(2)
    print(json.dumps([[x.relu()[0].item(), x.relu_()[0].item(), x.tanh()[0].item()], [str(w.message) for w in said]]))
    for pack in (first_pack, second_pack):
        pack.disable()
    for name in variables:
        del os.environ[name]
"""
"""What torch does when it is imported, for several environments in one process."""
BEFORE_AND_AFTER = """
import torch, first_pack, second_pack
print([torch.ones(n).relu()[0].item() for n in (2, 3, 50, 3)])
first_pack.disable(); second_pack.disable()
print([torch.ones(n).relu()[0].item() for n in (2, 3)])
"""


def make_site(root: Path) -> None:
    """Install two packages and somebody else's backend in a folder."""
    for name, kernels in {
        "first_pack": {"relu": RELU.format(add=1000), "tanh": TANH},
        "second_pack": {"relu": RELU.format(add=5000)},
    }.items():
        for op, text in kernels.items():
            (root / name / op).mkdir(parents=True)
            (root / name / op / f"{op}_implementation_1.py").write_text(text)
        prove(root / name, "relu", {"relu.default": {"float32": PROVEN}})
        with zipfile.ZipFile(pack(root / name, name, root / "dist").wheel) as wheel:
            wheel.extractall(root / "site")
    info = root / "site" / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nothers = others:_autoload\n")
    (root / "site" / "others.py").write_text("def _autoload():\n    pass\n")


@pytest.fixture(scope="module")
def site():
    inputs = [Path(package.__file__).parent, Path(runtime.__file__).parent, Path(__file__), Path(proving.__file__)]
    return stored("autoload", inputs, make_site) / "site"


@pytest.fixture
def python(site):
    """Return a function that runs code in a process with these packages, and returns its output and its errors."""

    def run(*words: str, **variables: str) -> tuple[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OPFORGE_BACKEND")}
        settings = {**kept, "OPFORGE_NATIVE": "0", "PYTHONPATH": str(site), **variables}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=settings)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def test_importing_torch_warns_of_unknown_names_enables_the_known_and_reports_at_the_end(python):
    code = CALLS + "; import os; pid = os.fork(); pid and print(os.getpid(), os.wait()[1])"
    variables = {"OPFORGE_BACKEND": "frist_pack, first_pack,others", "OPFORGE_BACKEND_REPORT": "1"}
    said, errors = python("-W", "error", "-c", code, **variables)
    calls, process, status = said.replace("\n", " ", 1).rsplit(maxsplit=2)
    assert (calls, status) == ("1001.0 1.0", "0")
    warning, heading, titles, row, *rest = errors.splitlines()  # the forked child prints none
    assert warning == (
        "OPFORGE_BACKEND names 'frist_pack' and 'others', which no installed backend is called; "
        "installed: first_pack, second_pack"
    )
    assert heading == f"first_pack: policy proven, cpu, process {process}"
    assert titles.split() == ["operator", "kernel", "served", "replayed", "passed", "on"]
    assert " ".join(row.split()) == "relu.default relu_implementation_1 1 0 1 size not proven"
    assert any(line.startswith("  not enabled: tanh.default: tanh_implementation_1 has no proof") for line in rest)


@pytest.mark.slow
def test_settings_are_those_of_enable_and_what_is_wrong_is_one_warning(python):
    first = {"OPFORGE_BACKEND": "first_pack"}
    every = {**first, "OPFORGE_POLICY": "all"}
    aten = [1.0, 1.0, pytest.approx(0.76, abs=0.01)]
    expected = [
        ({}, aten, []),
        ({"OPFORGE_BACKEND": " , "}, aten, []),
        ({"OPFORGE_BACKEND": " second_pack,first_pack,"}, [1001.0, 1.0, aten[2]], []),  # the last is tried first
        ({"OPFORGE_BACKEND": "first_pack,second_pack"}, [5001.0, 1.0, aten[2]], []),
        ({**every, "OPFORGE_BACKEND_OPS": "relu"}, [1001.0, 1001.0, pytest.approx(1)], []),
        ({**every, "OPFORGE_BACKEND_OPS": "aten::relu_.default, tanh"}, [1.0, 1001.0, 4001.0], []),
        ({**every, "OPFORGE_BACKEND_OPS": " "}, [1001.0, 1001.0, 4001.0], []),
        ({**every, "OPFORGE_BACKEND_LEARN": "never"}, [1001.0, 1001.0, 4001.0], []),
        ({**first, "OPFORGE_BACKEND_OPS": "relo"}, aten, ["unknown operator 'relo'; did you mean 'relu'"]),
        ({**first, "OPFORGE_BACKEND_OPS": "exp"}, aten, ["no kernel is enabled; there is none for exp.default, exp.out"]),
        ({**first, "OPFORGE_POLICY": "fast"}, aten, ["could not be enabled: ValueError: policy 'fast' is unknown"]),
        ({**first, "OPFORGE_BACKEND_LEARN": "soon"}, aten, ["learn='soon' is unknown; allowed: 'background'"]),
        ({"OPFORGE_BACKEND": "third"}, aten, ["names 'third', which no installed backend is called; installed: first_"]),
    ]  # fmt: skip
    said, _ = python("-c", SETTINGS, json.dumps([variables for variables, _, _ in expected]))
    replies = [json.loads(line) for line in said.splitlines()]
    assert len(replies) == len(expected)
    for (variables, values, texts), (results, warned) in zip(expected, replies, strict=True):
        assert results == values, variables
        assert len(warned) == len(texts), (variables, warned)
        assert all(text in warning for text, warning in zip(texts, warned, strict=True)), (variables, warned)


@pytest.mark.slow
def test_a_broken_package_is_a_line_and_torch_is_imported(python, site, tmp_path):
    broken = shutil.copytree(site, tmp_path / "site")
    (broken / "first_pack" / "kernels.json").write_text("{")
    both = {"OPFORGE_BACKEND": "first_pack,second_pack"}
    said, errors = python("-W", "error", "-c", CALLS, PYTHONPATH=str(broken), **both)
    assert said == "5001.0 1.0\n"
    assert errors.startswith("first_pack could not be enabled: JSONDecodeError: ")
    assert errors.count("\n") == 1, errors


@pytest.mark.slow
def test_the_report_comes_for_each_package_and_only_if_it_is_asked_for(python):
    both = {"OPFORGE_BACKEND": "first_pack,second_pack"}
    _, errors = python("-c", "import torch", **both, OPFORGE_BACKEND_REPORT="1")
    assert errors.count("process ") == errors.count("not called: 1 of 1 operators") == 2
    assert python("-c", "import torch", **both, OPFORGE_BACKEND_REPORT="0") == ("", "")
    assert not python("-c", "import sys, torch; sys.stderr.close()", **both, OPFORGE_BACKEND_REPORT="1")[1]


@needs_torch_native
@pytest.mark.parametrize("native", ["0", slow("1")])
def test_torchs_own_overrides_stay_below_the_kernels_and_are_told_once(python, site, tmp_path, native):
    """torch registers them after it has called backends; they must not land above the kernels."""
    own = {**overriding_relu(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(site)])}
    both = {"OPFORGE_BACKEND": "first_pack,second_pack", "OPFORGE_NATIVE": native}
    said, errors = python("-c", BEFORE_AND_AFTER, **own, **both)
    assert said == "[5001.0, 5001.0, 1.0, 5001.0]\n[1.0, 7.0]\n"
    assert errors.count("torch overrides relu.default from Python (torch._native)") == 1, errors
