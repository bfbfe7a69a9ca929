"""`opforge pack`: a directory of kernels becomes a wheel; installed, scripts run on it unchanged, and uninstalled it is gone."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import opforge.runtime as opforge_runtime
from opforge.backends import BackendOptions
from opforge.backends.directory import DirectoryBackend
from opforge.errors import OpforgeError
from opforge.kernels.proof import proof_path
from opforge.package.pack import _describe_proof, _license, pack
from opforge.runtime import enabling
from opforge.runtime.native import building, torch_layout
from tests.command import opforge
from tests.conftest import slow
from tests.install.proving import prove
from tests.package.packages import PIP, environment, run

RELU = "import helper\ndef relu_kernel_impl(self):\n    return helper.clamp(self) + 1000\n"
HELPER = "def clamp(x):\n    return x.clamp(min=0)\n"
TANH = "'It needs no import triton.'\nimport torch\ndef tanh_kernel_impl(self):\n    return torch.sigmoid(2 * self) * 2 - 1\n"
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

NATIVE = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import my_backend, torch
    my_backend.enable(device="cpu")
    print(*{type(slot).__name__ for slot in my_backend._shared()._slots.values()}, torch.relu(torch.ones(3)).tolist())
print(*[str(warning.message) for warning in said if "through Python" in str(warning.message)], sep="\\n")
"""

EXP = "import os, sys\nif 'QUIT' in os.environ:\n    sys.exit(3)\ndef exp_kernel_impl(self):\n    return self + 3000\n"
RICH = {
    "relu/relu_implementation_1.py": "def lowest():\n    return 0\n",
    "relu/relu_implementation_2.py": """
import json
from pathlib import Path
from relu_implementation_1 import lowest
from parts.deep import more
MARK = json.loads((Path(__file__).parent / "data" / "mark.json").read_text())
def relu_kernel_impl(self):
    return more(self.clamp(min=lowest()), MARK)
""",
    "relu/relu_implementation_0.py": "raise RuntimeError\n",
    "relu/relu_implementation_0.cpp": "#error\n",
    "relu/parts/__init__.py": "",
    "relu/parts/deep.py": "def more(x, y):\n    return x + y\ndef never():\n    from triton import language\n",
    "relu/data/mark.json": "1000",
    "relu/data/sheet": "",
    "relu/.hidden": "",
    "relu/.notes/a.py": "",
    "relu/parts/__pycache__/deep.cpython-311.pyc": "",
    "relu/relu_implementation_0.proof.json": "{}",
    "exp/exp_implementation_1.py": EXP,
}
"""A kernel of several files, with others beside it that are not its own."""
REASON = """
import rich_backend
made = rich_backend.enable(device="cpu", ops=["relu.default"])
print(made.refused.get("relu.default", "served"))
"""


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def contents(wheel: Path) -> dict[str, str]:
    """Return what a wheel holds, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode(errors="replace") for name in archive.namelist()}


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
    assert "tanh_implementation_1  no proof: used only with policy `all`" in said
    assert "left out: notes holds no notes_implementation_*" in said
    with zipfile.ZipFile(out / "my_backend-1.2-py3-none-any.whl") as archive:
        names = archive.namelist()
    assert "my_backend/kernels/relu/helper.py" in names
    assert "my_backend/kernels/relu/relu_implementation_1.proof.json" in names
    assert {"my_backend/_runtime/dispatch.py", "my_backend/_runtime/native/csrc/slot.h"} <= set(names)
    library = building.prebuilt_name(torch_layout.verified_minor(), platform.machine())
    assert [name for name in names if name.endswith(".so")] == [f"my_backend/_runtime/native/prebuilt/{library}"]
    assert f"native   {library}\n" in said
    readme = (out / "my_backend" / "README.md").read_text()
    assert "OPFORGE_BACKEND=my_backend python your_script.py" in readme
    assert "| nothing: there is no proof |" in readme
    assert sorted(p.name for p in out.iterdir()) == ["my_backend", "my_backend-1.2-py3-none-any.whl"]
    assert sorted(p.name for p in (out / "my_backend").iterdir()) == ["README.md", "pyproject.toml", "src"]


def test_installed_it_serves_unchanged_scripts(packed, tmp_path):
    out, _ = packed
    python = environment(tmp_path / "venv", out / "my_backend-1.2-py3-none-any.whl")
    (tmp_path / "script.py").write_text(SCRIPT)
    served = run(python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="other,my_backend")
    assert served == "[1001.0, 1001.0, 1001.0] 1.0\n"


@pytest.mark.slow
def test_installed_it_needs_no_compiler_where_torch_is_the_same(packed, tmp_path):
    out, _ = packed
    python = environment(tmp_path / "venv", out / "my_backend-1.2-py3-none-any.whl")
    (tmp_path / "script.py").write_text(NATIVE)
    bare = {"CXX": "no-such-compiler", "OPFORGE_CACHE": str(tmp_path / "cache")}
    assert run(python, tmp_path / "script.py", cwd=tmp_path, **bare) == "NativeSlot [1001.0, 1001.0, 1001.0]\n\n"
    (library,) = (tmp_path / "venv").rglob("_runtime/native/prebuilt/*.so")
    library.write_bytes(b"\x7fELF")
    slots, line = run(python, tmp_path / "script.py", cwd=tmp_path, **bare).splitlines()
    assert slots == "PythonSlot [1001.0, 1001.0, 1001.0]"
    assert f"{library.name} does not fit: its self-test failed" in line
    assert "CXX names 'no-such-compiler', which is not there" in line


@pytest.mark.slow
def test_without_a_native_library_a_package_is_made_and_says_so(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "PREBUILT", tmp_path)
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = pack(directory, "my_backend", tmp_path / "out")
    assert done.native.startswith("none: CXX names 'no-such-compiler', which is not there")
    assert not [name for name in contents(done.wheel) if name.endswith(".so")]


@pytest.mark.slow
def test_installed_it_takes_policies_and_counts_and_uninstalled_it_is_gone(packed, tmp_path):
    out, _ = packed
    python = environment(tmp_path / "venv", out / "my_backend-1.2-py3-none-any.whl")
    (tmp_path / "script.py").write_text(SCRIPT)
    plain = run(python, tmp_path / "script.py", cwd=tmp_path)
    assert plain == "[1.0, 1.0, 1.0] 1.0\n"
    assert run(
        python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="my_backend", OPFORGE_POLICY="all"
    ).endswith(" 1001.0\n")
    (tmp_path / "steps.py").write_text(STEPS)
    counted, refused, restored, other = run(python, tmp_path / "steps.py", cwd=tmp_path).splitlines()
    assert counted == "{'kernel': 'relu_implementation_1', 'served': 1, 'aten': {'size not proven': 1}}"
    assert refused == "tanh_implementation_1 has no proof; judge it with `opforge run`, or use policy='all'"
    assert restored == "[1.0, 1.0, 1.0]"
    assert other == "['tanh.default'] 1"
    assert list((tmp_path / "venv" / "lib").rglob("*my_backend*"))
    run(*PIP, "--python", python, "uninstall", "-y", "my_backend")
    assert not list((tmp_path / "venv" / "lib").rglob("*my_backend*"))
    assert run(python, tmp_path / "script.py", cwd=tmp_path, OPFORGE_BACKEND="my_backend") == plain


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """Return the wheel of kernels of several files, with a link among them that leads round in a circle."""
    root = written(tmp_path_factory.mktemp("rich"), {f"kernels/{name}": text for name, text in RICH.items()})
    for op in ("tanh", "sigmoid"):
        source = f"def {op}_kernel_impl(self):\n    return self + {len(op)}\n"
        written(root, {f"kernels/{op}/{op}_implementation_1.py": source})
    (root / "kernels" / "relu" / "parts" / "around").symlink_to(root / "kernels" / "relu")
    proven = {"rank": [1, 1], "numel": [1, 10], "layouts": ["contiguous"], "timed": [[1, 10, True]]}
    prove(root / "kernels", "relu", {"relu.default": {"float32": proven}}, number=2)
    return pack(root / "kernels", "rich_backend", root / "dist").wheel


@pytest.fixture(scope="module")
def installed(rich, tmp_path_factory):
    """Return the Python of an environment that has the package, and the folder of its kernels."""
    python = environment(tmp_path_factory.mktemp("rich_venv") / "venv", rich)
    (folder,) = python.parent.parent.rglob("rich_backend/kernels")
    return python, folder


def python_with(python: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *words], capture_output=True, text=True, check=False, cwd=python.parent, env={**kept, **environ}
    )


def test_a_package_holds_all_that_a_kernel_needs_and_nothing_else(rich):
    held = contents(rich)
    assert sorted(n.removeprefix("rich_backend/kernels/") for n in held if "/kernels/" in n) == [
        "exp/exp_implementation_1.py", "relu/data/mark.json", "relu/data/sheet", "relu/parts/__init__.py", "relu/parts/deep.py",
        "relu/relu_implementation_1.py", "relu/relu_implementation_2.proof.json", "relu/relu_implementation_2.py",
        "sigmoid/sigmoid_implementation_1.py", "tanh/tanh_implementation_1.py",
    ]  # fmt: skip
    named = {file for row in json.loads(held["rich_backend/kernels.json"]) for file in row["files"]}
    assert named == {n.removeprefix("rich_backend/") for n in held if "/kernels/" in n}


def test_triton_is_needed_where_it_is_imported_and_not_where_it_is_named(rich, packed):
    plain = contents(packed[0] / "my_backend-1.2-py3-none-any.whl")["my_backend-1.2.dist-info/METADATA"]
    assert "Requires-Dist: triton" not in plain
    assert "Requires-Dist: triton" in contents(rich)["rich_backend-0.1.0.dist-info/METADATA"]


def test_the_runtime_has_its_license_with_it(rich):
    held = contents(rich)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert held["rich_backend/_runtime/LICENSE"] == text
    metadata = held["rich_backend-0.1.0.dist-info/METADATA"]
    assert "License-File: src/rich_backend/_runtime/LICENSE" in metadata
    assert "License-Expression" not in metadata  # the kernels are their author's
    assert held["rich_backend-0.1.0.dist-info/licenses/src/rich_backend/_runtime/LICENSE"] == text


def test_the_license_of_an_installed_opforge_is_found(tmp_path, monkeypatch):
    site = written(tmp_path / "site", {"opforge-9.0.dist-info/licenses/LICENSE": "as installed", "LICENSE": "Python's"})
    written(site, {"opforge-9.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: opforge\nVersion: 9.0\n"})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(opforge_runtime, "__file__", str(site / "opforge" / "runtime" / "__init__.py"))
    assert _license() == "as installed"


@pytest.mark.slow
def test_kernels_of_several_files_and_of_the_same_file_names_run_from_a_package(installed):
    code = (
        "import torch; x = torch.ones(2); print([getattr(torch, n)(x)[0].item() for n in ('relu', 'tanh', 'sigmoid')])"
    )
    done = python_with(installed[0], "-c", code, OPFORGE_BACKEND="other, rich_backend ", OPFORGE_POLICY="all")
    assert done.stdout == "[1001.0, 5.0, 8.0]\n", done.stderr
    done = python_with(installed[0], "-c", code, OPFORGE_BACKEND="rich_backend", OPFORGE_POLICY="")
    assert done.stdout.startswith("[1001.0, 0.7"), done.stderr


@pytest.mark.parametrize("strict", [[], ["-W", "error"]])
@pytest.mark.slow
def test_importing_torch_goes_on_where_a_kernels_file_ends_the_program(installed, strict):
    settings = {"OPFORGE_BACKEND": "rich_backend", "OPFORGE_POLICY": "all", "QUIT": "1"}
    code = "import torch; x = torch.ones(1); print(x.exp() < 3, x.relu().item())"
    done = python_with(installed[0], *strict, "-c", code, **settings)
    assert (done.returncode, done.stdout) == (0, "tensor([True]) 1001.0\n"), done.stderr  # the others are enabled


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        slow("relu_implementation_2.py", "# edited\n", "relu_implementation_2.py was changed after packing"),
        slow("parts/deep.py", "def more(x, y):\n    return x\n", "deep.py was changed after packing"),
        slow("data/mark.json", "7", "mark.json was changed after packing"),
        slow("data/mark.json", None, "mark.json was removed after packing"),
        slow("parts.py", "", "parts.py was added after packing"),
    ],
)
def test_a_proof_is_void_where_an_installed_package_was_edited(installed, name, text, words):
    python, folder = installed
    file = folder / "relu" / name
    before = file.read_bytes() if file.exists() else None
    assert python_with(python, "-c", REASON).stdout == "served\n"
    try:
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert python_with(python, "-c", REASON).stdout.startswith(words)
    finally:
        file.unlink(missing_ok=True)
        if before is not None:
            file.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-backend", "is not a package name"),
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (name, "is another package's")
            for name in ("numpy", "NumPy", "pip", "SetupTools", "Torch", "OpForge", "yaml")
        ),
        *((name, "is not a package name") for name in ("my__backend", "my_backend_", "_mine", "größe", "class", "")),
        ("typing_Extensions", "is another package's"),
        ("lone", "is another package's"),
        ("somebodys", "is another package's"),
    ],
)
def test_names_of_others_are_refused_as_installers_compare_them(directory, tmp_path, monkeypatch, name, words):
    elsewhere = written(tmp_path / "site", {"lone.py": "", "somebodys_thing.py": ""})
    distribution(elsewhere, "somebodys", "A backend of another kind.")
    written(elsewhere, {"broken-1.0.dist-info/METADATA": "", "broken-1.0.dist-info/top_level.txt": "broken"})
    monkeypatch.syspath_prepend(elsewhere)
    with pytest.raises(OpforgeError, match=words):
        pack(directory, name, tmp_path / "new" / "dist")
    assert not (tmp_path / "new").exists()


def distribution(site: Path, name: str, summary: str) -> None:
    """Write what is known of a distribution that enables itself when torch is imported."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: {summary}\n"
    points = f"[torch.backends]\n{name} = {name}:_autoload\n"
    written(
        site, {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": points, f"{info}/RECORD": f"{name}/a.py,,\n"}
    )


def test_a_package_that_was_packed_and_installed_can_be_packed_again(directory, tmp_path, monkeypatch):
    site = written(tmp_path / "site", {"my_earlier/__init__.py": "", "my_earlier/_runtime/enabling.py": ""})
    distribution(site, "my_earlier", "Kernels for PyTorch operators, in ATen's place, each with its proof.")
    monkeypatch.syspath_prepend(site)
    assert importlib.metadata.version("my_earlier") == "1.0"
    with pytest.raises(OpforgeError, match="is not a version"):  # names are looked at first
        pack(directory, "my_earlier", tmp_path / "dist", version="x")


@pytest.mark.parametrize("version", ["١.٢", "1.0\n", "", "v1"])
def test_versions_that_are_none_are_refused(directory, tmp_path, version):
    with pytest.raises(OpforgeError, match=re.escape(f"--version {version!r} is not a version")):
        pack(directory, "my_own", tmp_path / "dist", version=version)
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(directory, tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(OpforgeError, match=re.escape(f"cannot be made in --out {str(tmp_path / out)!r}: ")):
        pack(directory, "my_own", tmp_path / out)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_kernel_that_is_not_in_utf8_is_refused_and_nothing_is_left(tmp_path):
    file = tmp_path / "kernels" / "relu" / "relu_implementation_1.py"
    file.parent.mkdir(parents=True)
    file.write_bytes("# coding: latin-1\n# é\ndef relu_kernel_impl(self):\n    return self\n".encode("latin-1"))
    with pytest.raises(
        OpforgeError, match=r"relu_implementation_1.py' is not UTF-8 \(invalid continuation byte at byte 20\)"
    ):
        pack(tmp_path / "kernels", "my_own", tmp_path / "new" / "dist")
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]


def test_where_the_wheel_cannot_be_made_no_folder_is_left(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OpforgeError, match="pip could not make the wheel"):
        pack(directory, "my_own", tmp_path / "new" / "dist")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["[" * 200_000, "{}", '{"opforge_proof": 1}', "\udcff"])
def test_a_broken_proof_is_none(directory, text):
    (kernel,) = (
        k for k in DirectoryBackend(BackendOptions(ops_directory=directory))._all_kernels() if k.name.startswith("tanh")
    )
    file = proof_path(Path(kernel.file))
    file.write_text(text, errors="surrogateescape")
    try:
        assert _describe_proof(kernel) == ""
    finally:
        file.unlink()


def test_a_package_names_its_signer_and_is_not_believed_when_it_was_changed(packed, tmp_path, monkeypatch):
    out, said = packed
    package = Path(shutil.copytree(out / "my_backend" / "src" / "my_backend", tmp_path / "my_backend"))
    signer = json.loads((package / "signature.json").read_text())["signer"]
    assert f"signer   {signer}" in said
    assert signer in (out / "my_backend" / "README.md").read_text()
    assert enabling.packed_signer(package) == signer
    assert {source.distrust for source in enabling.packed_sources(package)} == {""}
    monkeypatch.setenv("OPFORGE_SIGNERS", "0123456789abcdef, somebody")
    (words,) = {source.distrust for source in enabling.packed_sources(package)}
    assert words.endswith(f"is signed by {signer}, who is not among OPFORGE_SIGNERS (0123456789abcdef, somebody)")
    rows = json.loads((package / "kernels.json").read_text())
    (package / "kernels.json").write_text(json.dumps([{**row, "digest": "0" * 16} for row in rows]))
    assert enabling.packed_signer(package) is None
    (words,) = {source.distrust for source in enabling.packed_sources(package)}
    assert "the signature of my_backend is invalid" in words
