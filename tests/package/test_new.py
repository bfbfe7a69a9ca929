"""`opforge new`: the same package as Cookiecutter makes, names that are refused, and a Triton package that works."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import zipfile
from itertools import product

import pytest

from opforge.errors import OpforgeError
from opforge.package import new
from tests.command import opforge
from tests.conftest import ROOT
from tests.package.packages import bake, cookiecutter, environment, files_of, install, run, run_tests, wheel

ANSWERS = {"description": "Operators of Anna's: fast & small", "author": "Anna O'Hara", "torch": "2.12"}


@pytest.mark.parametrize(("variant", "abi"), list(product(("triton", "cpp"), ("stable", "full"))))
def test_it_makes_what_cookiecutter_makes(variant, abi, tmp_path):
    answers = {"variant": variant, "abi": abi, **ANSWERS}
    options = [word for name, value in answers.items() for word in (f"--{name}", value)]
    ours = files_of(bake(tmp_path / "ours", "fine_ops", *options))
    theirs = files_of(cookiecutter(new.TEMPLATE_FOLDER, tmp_path / "theirs", package="fine_ops", **answers))
    assert ours == theirs
    assert not [name for name in ours if name.startswith("variants/")]
    assert not [name for name, text in ours.items() if b"cookiecutter" in text or b"{%" in text]


def test_the_defaults_are_cookiecutters(tmp_path):
    theirs = cookiecutter(new.TEMPLATE_FOLDER, tmp_path / "theirs", package="my_ops")
    assert files_of(bake(tmp_path / "ours", "my_ops")) == files_of(theirs)


def test_cookiecutter_asks_and_refuses(tmp_path):
    command = [sys.executable, "-m", "cookiecutter", "--default-config", "-o", str(tmp_path), str(new.TEMPLATE_FOLDER)]
    done = subprocess.run(command, input="aten\n\n\n\n\n\n", capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'aten' is a namespace that torch or a well known package has already" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run(command, input="asked_ops\n2\n2\n\n\n\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "asked_ops") == files_of(
        bake(tmp_path / "b", "asked_ops", "--variant", "cpp", "--abi", "full")
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My-Ops", "must begin with a small letter"),
        ("2fast", "must begin with a small letter"),
        ("_hidden", "must begin with a small letter"),
        ("lambda", "is a keyword of Python"),
        ("match", "is a keyword of Python"),
        ("statistics", "is a module of Python's standard library"),
        ("aten", "is a namespace that torch"),
        ("load_library", "is a namespace that torch"),
        ("torch", "is reserved"),
        ("a" * 300, "'aaaaaaaaaaaaaaaaaaaa…' is too long: it has 300 characters and may have 64"),
        ("kernels", "is reserved"),
        ("csrc", "is reserved"),
        ("jinja2", "is taken: "),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, why, tmp_path):
    with pytest.raises(OpforgeError, match=why):
        new.make_package({"package": name}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_namespaces_of_torch_are_known():
    code = (
        "import torch; print(*{n.partition('::')[0] for n in torch._C._dispatch_get_all_op_names()}, *vars(torch.ops))"
    )
    names = {name for name in run(sys.executable, "-c", code).split() if not name.startswith("_")}
    assert "aten" in names
    assert names - new._hook("pre_gen_project").TORCH_NAMESPACES == set()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"variant": "rust"}, "unknown variant 'rust'; allowed: triton, cpp"),
        ({"abi": "none"}, "unknown abi 'none'; allowed: stable, full"),
        ({"torch": "2.x"}, "torch version '2.x' cannot be used"),
        ({"torch": "2.4"}, "torch version '2.4' is too old: 2.11 is the oldest"),
        ({"description": 'a "quoted" one'}, "one line without"),
        ({"description": "two\nlines"}, "one line without"),
        ({"description": " "}, "the description is empty"),
        ({"author": "{{ 7 }}"}, "one line without"),
    ],
)
def test_a_wrong_answer_is_refused(answers, why, tmp_path):
    with pytest.raises(OpforgeError, match=why):
        new.make_package({"package": "fine_ops", **answers}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "fine_ops").mkdir()
    (tmp_path / "fine_ops" / "mine.txt").write_text("mine")
    done = opforge("new", "fine_ops", "--yes", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty; choose another name, or another place with --out" in done.stderr
    assert files_of(tmp_path) == {"fine_ops/mine.txt": b"mine"}
    (tmp_path / "fine_ops" / "mine.txt").unlink()
    assert (bake(tmp_path, "fine_ops") / "pyproject.toml").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["fine_ops"]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new._hook("post_gen_project"), "keep_variant", fails)
    with pytest.raises(OpforgeError, match="cannot be made: No space left on device; give another place with --out"):
        new.make_package({"package": "fine_ops"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_must_be_given():
    done = opforge("new", "--yes")
    assert done.returncode == 2
    assert "the name of the package is missing; give one" in done.stderr


@pytest.mark.slow
def test_what_pip_compiled_of_the_template_is_left_out(tmp_path):
    template = tmp_path / "template"
    shutil.copytree(new.TEMPLATE_FOLDER, template)
    compiled = template / "{{cookiecutter.package}}" / "tests" / "__pycache__" / "support.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"\x00\x01")
    assert files_of(cookiecutter(template, tmp_path, package="my_ops")) == files_of(bake(tmp_path / "ours", "my_ops"))


@pytest.mark.slow
def test_the_wheel_of_opforge_has_the_whole_template(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "BackendBench"):
        shutil.copytree(ROOT / name, tmp_path / "opforge" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "opforge")
    packed = zipfile.ZipFile(wheel(tmp_path / "opforge", tmp_path)).namelist()
    source = tmp_path / "opforge" / "src"
    folders = (source / "opforge" / "package" / name for name in ("template", "operator"))
    files = {str(p.relative_to(source)) for folder in folders for p in folder.rglob("*") if p.is_file()}
    assert any("/.github/" in name for name in files)
    assert files - set(packed) == set()
    assert not any(name.startswith("BackendBench") for name in packed)  # it would overwrite an installed one


def test_the_template_is_shown():
    assert opforge("new", "--template").stdout == f"{new.TEMPLATE_FOLDER}\n"


def test_it_asks_at_a_terminal_until_the_answer_can_be_used(tmp_path):
    ours, theirs = pty.openpty()
    os.write(ours, b"torch\nasked_ops\ncpp\nnone\nfull\nAll mine\nAnna\n\n")
    command = [sys.executable, "-m", "opforge.cli", "new", "--out", str(tmp_path)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False, timeout=60)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "package name 'torch' is reserved; choose another, such as my_torch" in done.stderr
    assert "unknown abi 'none'; allowed: stable, full" in done.stderr
    assert done.stdout.startswith(f"made {tmp_path}/asked_ops (cpp, full ABI)")
    assert "All mine." in (tmp_path / "asked_ops" / "README.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return bake(tmp_path_factory.mktemp("new"), "fine_ops", "--author", "Anna")


@pytest.fixture(scope="module")
def installed(project, tmp_path_factory):
    return install(project, tmp_path_factory.mktemp("installed"))


def test_it_says_what_comes_next(tmp_path):
    done = opforge("new", "fine_ops", "--out", ".", "--yes", cwd=tmp_path)
    assert done.stdout.splitlines()[0].startswith("made fine_ops (triton), ")
    words = "pip install 'torch>=2.11' 'setuptools>=77'\n{}pip install --no-build-isolation -e '.[test]'\n{}pytest\n"
    assert f"  cd fine_ops\n  {words.format('  ', '  ')}" in done.stdout
    assert f"$ {words.format('$ ', '$ ')}" in (tmp_path / "fine_ops" / "README.md").read_text()
    done = opforge("new", "fast_ops", "--variant", "cpp", "--out", ".", "--yes", cwd=tmp_path)
    needed = "pip install 'torch>=2.11' scikit-build-core cmake ninja"
    assert f"\n  {needed}  # and a C++ compiler: apt install g++\n" in done.stdout
    assert f"\n$ {needed}\n" in (tmp_path / "fast_ops" / "README.md").read_text()


@pytest.mark.slow
def test_an_old_setuptools_is_refused_in_one_line(tmp_path):
    """The setuptools of a new environment may be too old; what it says itself about it fills two pages."""
    project = bake(tmp_path, "old_ops")
    run(sys.executable, "-m", "venv", tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    shown = subprocess.run(
        [python, "-c", "import setuptools as s; print(s.__version__)"], capture_output=True, text=True, check=False
    )
    version = shown.stdout.strip()
    if not version or int(version.partition(".")[0]) >= 77:
        pytest.skip(f"the setuptools of a new environment is not too old here: {version or 'there is none'}")
    words = ("install", "--no-deps", "--no-index", "--no-build-isolation", "-e", project)
    done = subprocess.run([python, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "[1 lines of output]" in done.stderr
    assert f"setuptools 77 or newer is needed, not {version}: pip install 'setuptools>=77'" in done.stderr


def test_what_it_makes_is_tidy(project):
    run("ruff", "check", ".", cwd=project)
    run("ruff", "format", "--check", ".", cwd=project)
    run("mypy", cwd=project)


@pytest.mark.slow
def test_its_tests_pass_without_a_gpu(project, installed):
    printed = run_tests(project, installed, "-n0")
    assert " passed" in printed
    assert "skipped" not in printed


MODEL = """
import pathlib, sys
text = pathlib.Path(sys.argv[1]).read_text()
exec(text.partition("```python\\n")[2].partition("```")[0].replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"))
x = torch.randn(3, 64)
model(x).square().sum().backward()
assert model.weight.grad.abs().sum() > 0 and len(list(model.parameters())) == 3
import fine_ops
print(fine_ops.__file__)
"""


@pytest.mark.slow
def test_its_wheel_works_elsewhere(project, tmp_path):
    made = wheel(project, tmp_path)
    assert made.name == "fine_ops-0.1.0-py3-none-any.whl"
    python = environment(tmp_path / "environment", made)
    readme = project / "README.md"
    where = run(python, "-W", "error", "-c", MODEL, readme, cwd=tmp_path, TRITON_INTERPRET="1").strip()
    assert where.startswith(str(tmp_path / "environment"))
    needs = run(python, "-c", "from importlib.metadata import requires; print(requires('fine_ops'))")
    assert "torch>=2.11" in needs
    assert "triton; sys_platform" in needs


@pytest.mark.slow
def test_without_gpu_and_interpreter_it_says_what_to_do(installed):
    code = "import torch, fine_ops\ntry:\n    fine_ops.swiglu(torch.ones(2), torch.ones(2))\nexcept RuntimeError as error:\n    print(error)"
    assert "set TRITON_INTERPRET=1 in the environment before fine_ops is imported" in run(
        sys.executable, "-c", code, path=installed
    )


@pytest.mark.slow
def test_its_benchmark_runs(project, installed):
    words = ("--device", "cpu", "--rows", "2", "--size", "8", "--seconds", "0.01", "--eager")
    printed = run(sys.executable, project / "benchmarks" / "bench.py", *words, path=installed)
    assert [line.split()[0] for line in printed.splitlines()] == [
        "microseconds",
        "swiglu",
        "row_moments",
        "add_scaled_",
        "rms_norm",
    ]
