"""Every command that the README and the pages in docs/ show is run, and answers as shown, numbers aside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.authoring.packages import environment
from tests.conftest import NOT_PROOFS, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands() -> list[tuple[str, int, list[str], str]]:
    """Return what is shown: command, expected exit code, lines of output, and where."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                head, *lines = part.rstrip("\n").split("\n")
                command, _, remark = head.partition("   # exit ")
                found.append((command, int(remark or 0), lines, page.name))
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the commands need, in which they may write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("BackendBench", "examples", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_PROOFS)
    return folder


@pytest.fixture(scope="module")
def commands_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with commands of an environment in which pages may install packages; it has what is here besides."""
    python = environment(tmp_path_factory.mktemp("environment") / "env")
    for module in ("pip", "pytest", "cookiecutter", "opforge.cli"):
        script = python.parent / module.partition(".")[0]
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {module} "$@"\n')
        script.chmod(0o755)
    return python.parent


@pytest.mark.parametrize(
    ("command", "code", "lines", "page"), commands(), ids=lambda v: v[:60] if isinstance(v, str) else None
)
def test_a_command_answers_as_shown(command, code, lines, page, checkout, commands_folder):
    path = os.pathsep.join([str(commands_folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        command, shell=True, cwd=checkout, capture_output=True, text=True, env=surroundings, check=False
    )
    assert done.returncode == code, done.stderr
    said = [comparable(line) for line in done.stdout.splitlines()]
    for line in lines:
        assert any(comparable(line).split(" opforge-runs/")[0] in s for s in said), (page, line, done.stdout)


def comparable(line):
    """Return a line without its numbers, which differ from machine to machine."""
    return re.sub(r"[\d.]+(e-\d+)?", "#", " ".join(line.split()))


def test_there_are_commands_to_run():
    assert len(commands()) >= 9
