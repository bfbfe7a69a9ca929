"""`opforge pack`: a directory of kernels becomes a wheel; installed, scripts run on it unchanged, and uninstalled it is gone."""

from __future__ import annotations

import zipfile

import pytest

from tests.authoring.packages import PIP, environment, run
from tests.conftest import opforge
from tests.install.proving import prove

RELU = "import helper\ndef relu_kernel_impl(self):\n    return helper.clamp(self) + 1000\n"
HELPER = "def clamp(x):\n    return x.clamp(min=0)\n"
TANH = "import torch\ndef tanh_kernel_impl(self):\n    return torch.sigmoid(2 * self) * 2 - 1\n"
SCRIPT = """
import torch
print(torch.relu(torch.ones(3)).tolist(), torch.relu(torch.ones(50)).tolist()[0])
"""
STEPS = """
import my_backend, torch
made = my_backend.enable(device="cpu")
torch.relu(torch.ones(3)); torch.relu(torch.ones(50))
print(made.counters()["relu.default"])
print(made.refused["tanh.default"])
my_backend.disable()
print(torch.relu(torch.ones(3)).tolist())
with my_backend.enabled(device="cpu", policy="all", ops=["tanh.default"]) as made:
    torch.tanh(torch.ones(2)); print(made.operators, made.counters()["tanh.default"]["served"])
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a proven kernel that has a module beside it, and one without a proof."""
    root = tmp_path_factory.mktemp("kernels")
    for op, files in {
        "relu": {"relu_implementation_1.py": RELU, "helper.py": HELPER},
        "tanh": {"tanh_implementation_1.py": TANH},
    }.items():
        (root / op).mkdir()
        for name, text in files.items():
            (root / op / name).write_text(text)
    (root / "notes").mkdir()
    proven = {"rank": [1, 1], "numel": [1, 10], "layouts": ["contiguous"], "timed": [[1, 10, True]]}
    prove(root, "relu", {"relu.default": {"float32": proven}})
    return root


@pytest.fixture(scope="module")
def packed(directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    done = opforge("pack", str(directory), "--name", "my_backend", "--out", str(out), "--version", "1.2")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_package_is_readable_and_says_what_is_proven(packed):
    out, said = packed
    assert "relu_implementation_1  1 operators, float32 on " in said
    assert "tanh_implementation_1  no proof: served with policy all only" in said
    assert "left out: notes holds no notes_implementation_*" in said
    with zipfile.ZipFile(out / "my_backend-1.2-py3-none-any.whl") as archive:
        names = archive.namelist()
    assert "my_backend/kernels/relu/helper.py" in names
    assert "my_backend/kernels/relu/relu_implementation_1.proof.json" in names
    assert "my_backend/_runtime/serving.py" in names
    readme = (out / "my_backend" / "README.md").read_text()
    assert "OPFORGE_BACKEND=my_backend python your_script.py" in readme
    assert "| nothing: there is no proof |" in readme
    assert sorted(p.name for p in out.iterdir()) == ["my_backend", "my_backend-1.2-py3-none-any.whl"]
    assert sorted(p.name for p in (out / "my_backend").iterdir()) == ["README.md", "pyproject.toml", "src"]


def test_installed_it_serves_unchanged_scripts_and_uninstalled_it_is_gone(packed, tmp_path):
    out, _ = packed
    python = environment(tmp_path / "venv", out / "my_backend-1.2-py3-none-any.whl")
    (tmp_path / "script.py").write_text(SCRIPT)
    plain = run(python, tmp_path / "script.py", cwd=tmp_path)
    assert plain == "[1.0, 1.0, 1.0] 1.0\n"
    served = run(python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="other,my_backend")
    assert served == "[1001.0, 1001.0, 1001.0] 1.0\n"
    assert run(
        python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="my_backend", OPFORGE_POLICY="all"
    ).endswith(" 1001.0\n")
    (tmp_path / "steps.py").write_text(STEPS)
    counted, refused, restored, other = run(python, tmp_path / "steps.py", cwd=tmp_path).splitlines()
    assert counted == "{'kernel': 'relu_implementation_1', 'served': 1, 'aten': {'size not proven': 1}}"
    assert refused == "tanh_implementation_1 has no proof; judge it with `opforge run`, or take policy='all'"
    assert restored == "[1.0, 1.0, 1.0]"
    assert other == "['tanh.default'] 1"
    assert list((tmp_path / "venv" / "lib").rglob("*my_backend*"))
    run(*PIP, "--python", python, "uninstall", "-y", "my_backend")
    assert not list((tmp_path / "venv" / "lib").rglob("*my_backend*"))
    assert run(python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="my_backend") == plain


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-backend", "cannot be that of a package"),
        ("json", "is another package's"),
        ("torch", "is another package's"),
    ],
)
def test_names_that_cannot_be_are_refused(directory, tmp_path, name, words):
    done = opforge("pack", str(directory), "--name", name, "--out", str(tmp_path / "dist"))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "dist").exists()


def test_what_is_there_is_not_overwritten(directory, packed):
    out, _ = packed
    done = opforge("pack", str(directory), "--name", "my_backend", "--out", str(out))
    assert done.returncode == 2
    assert "exists already" in done.stderr
