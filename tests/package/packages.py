"""Packages made from the template: baked, installed, tested, packed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from opforge.package import new
from tests.command import opforge
from tests.store import stored

SEARCH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""The PATH with the commands of this environment first: ruff, mypy, cmake and ninja are those that it has."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


SCHEMAS = {
    "scale_add": "scale_add(Tensor x, Tensor y, float a=1.0, int[] dims=[]) -> (Tensor, Tensor)",
    "shift_": "shift_(Tensor(a!) input, Tensor y, Tensor? bias=None, int n=2, float[] steps=[]) -> Tensor",
    "add_all": "add_all(Tensor a, Tensor b, float s, bool flag=False, Tensor? c=None) -> Tensor",
    "total_of": "total_of(Tensor input, int dim, bool keepdim=False) -> Tensor",
    "fill_up": "fill_up(int[] size, float value_of=1.0) -> (Tensor, Tensor)",
    "quiet_": "quiet_(Tensor(a!) x, float a) -> ()",
}
"""Schemas for `add-op`: several tensors, numbers, lists, sums over dimensions, no tensor, in place."""


def run(*command: object, cwd: Path | None = None, path: Path | None = None, **environment: str) -> str:
    """Run a command in a process of its own, with one folder on Python's path at most; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    kept["PATH"] = SEARCH
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env={**kept, **environment}, check=False
    )
    assert done.returncode == 0, f"{command} in {cwd}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def bake(out: Path, package: str, *options: str) -> Path:
    """Make a package with the command line; return its folder."""
    done = opforge("new", package, "--yes", "--out", str(out), *options)
    assert done.returncode == 0, done.stderr
    return out / package


def cookiecutter(template: Path, out: Path, **answers: str) -> Path:
    """Make a package with the Cookiecutter command; return its folder."""
    words = [f"{name}={value}" for name, value in answers.items()]
    run(sys.executable, "-m", "cookiecutter", "--no-input", "--default-config", "-o", out, template, *words)
    return out / answers["package"]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files, by path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def install(project: Path, target: Path, **environment: str) -> Path:
    """Install a package into a folder, built with what is installed here."""
    words = ("--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", target, project)
    run(*PIP, "install", *words, **environment)
    return target


@dataclass(frozen=True)
class Package:
    """A package that was made, and the folder into which it is installed."""

    project: Path
    target: Path


def stored_package(name: str, variant: str) -> Package:
    """Return a package just as it is made, installed; its C++ is compiled without optimisation, in half the time."""

    def make(place: Path) -> None:
        project = bake(place, name, "--variant", variant)
        fast = {"SKBUILD_CMAKE_BUILD_TYPE": "Debug", "SKBUILD_CMAKE_DEFINE": "CMAKE_CXX_FLAGS_DEBUG=-O0"}
        install(project, place / "target", **fast)

    place = stored(name, [new.TEMPLATE_FOLDER, Path(new.__file__)], make)
    return Package(place / name, place / "target")


def run_tests(project: Path, target: Path, *words: str) -> str:
    """Run a package's own tests on what is installed; return what pytest printed."""
    return run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, cwd=project, path=target)


def wheel(project: Path, out: Path) -> Path:
    """Return the wheel of a package."""
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, project)
    (made,) = out.glob("*.whl")
    return made


def environment(folder: Path, *wheels: Path) -> Path:
    """Return the Python of a new environment in which wheels are installed, and torch as it is here."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    for made in wheels:
        run(*PIP, "--python", python, "install", "--no-deps", "--no-index", made)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
