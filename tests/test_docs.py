"""Every command that the README and the pages in docs/ show is run, and answers as shown, numbers aside."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from opforge.sandbox.host.client import SERVER_VARIABLE
from tests.command import opforge
from tests.conftest import NOT_PROOFS, ROOT
from tests.package.packages import environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
SLOW = {
    "README.md",
    "authoring.md",
    "backendbench.md",
    "compare.md",
    "custom-ops.md",
    "edge.md",
    "generation.md",
    "install.md",
    "judge.md",
    "models.md",
    "native.md",
    "results.md",
    "strength.md",
    "suites.md",
    "timing.md",
    "warm.md",
    "queries.md",
    "scale.md",
    "traces.md",
}
"""Pages that compile packages and programs, start clusters, or take long and have tests of their own elsewhere."""


@dataclass(frozen=True)
class Command:
    """A command as a page shows it."""

    text: str
    code: int
    lines: list[str]


def commands(page: Path) -> list[Command]:
    """Return the commands that a page shows, with their exit codes and the output that it shows."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            head, *lines = part.rstrip("\n").split("\n")
            text, _, remark = head.partition("   # exit ")
            found.append(Command(text, int(remark or 0), lines))
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the commands need, in which they may write."""
    for name in ("BackendBench", "examples", "src"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=NOT_PROOFS)
    return tmp_path / "checkout"


@pytest.fixture
def surroundings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a page's commands; a page that installs packages gets one of its own for them."""
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    found = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PIP_NO_INDEX": "1"}
    found["OPFORGE_RACE_SECONDS"] = "1"  # what is shown is what a user gets
    if any(command.text.startswith("pip install") for command in commands(request.node.callspec.params["page"])):
        path.insert(0, str(_commands_folder(tmp_path)))
        found.pop(SERVER_VARIABLE)  # it has another Python
    return {**found, "PATH": os.pathsep.join(path)}


def _commands_folder(folder: Path) -> Path:
    """Return a folder with commands of a new environment, which also has the packages that are installed here."""
    python = environment(folder / "env")
    for module in ("pip", "pytest", "cookiecutter", "opforge.cli"):
        script = python.parent / module.partition(".")[0]
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        script.chmod(0o755)
    return python.parent


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else (), id=page.name)
        for page in PAGES
        if commands(page)
    ],
)
def test_commands_answer_as_shown(page: Path, checkout: Path, surroundings: dict[str, str]) -> None:
    for command in commands(page):
        done = run(command.text, checkout, surroundings)
        assert done.returncode == command.code, f"{command.text}\n{done.stdout}\n{done.stderr}"
        said = [comparable(line) for line in done.stdout.splitlines()]
        for line in command.lines:
            shown = comparable(line).split(" opforge-runs/")[0]
            assert any(shown in s for s in said), f"{command.text}\n{line}\n{done.stdout}"


def run(text: str, folder: Path, surroundings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does; a plain opforge command, in this environment, runs in this process."""
    program, *words = shlex.split(text)
    if program == "opforge" and SERVER_VARIABLE in surroundings and not set("|&;<>$`") & set(text):
        return opforge(*words, cwd=folder, **surroundings)
    return subprocess.run(text, shell=True, cwd=folder, capture_output=True, text=True, env=surroundings, check=False)


def comparable(line: str) -> str:
    """Return a line without its numbers, which differ from machine to machine."""
    return re.sub(r"[\d.]+(e-\d+)?", "#", " ".join(line.split()))


def test_there_are_commands_to_run() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 100
