"""Every command that the README and the pages in docs/ show is run, and answers as shown, numbers aside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

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
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("command", "code", "lines", "page"), commands(), ids=lambda v: v[:60] if isinstance(v, str) else None
)
def test_a_command_answers_as_shown(command, code, lines, page, checkout):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, shell=True, cwd=checkout, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False
    )
    assert done.returncode == code, done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in lines:
        wanted = re.sub(r"[\d.]+(e-\d+)?", "#", " ".join(line.split()))
        assert any(wanted.split(" opforge-runs/")[0] in re.sub(r"[\d.]+(e-\d+)?", "#", s) for s in said), (
            page,
            line,
            done.stdout,
        )


def test_there_are_commands_to_run():
    assert len(commands()) >= 9
