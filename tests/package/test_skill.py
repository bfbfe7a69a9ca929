"""`opforge skill`: the folder it writes, and the commands in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from opforge.cli.main import app
from tests.command import opforge

RELU = "import torch\ndef relu_kernel_impl(self):\n    return torch.where(self <= 0, 0, self)\n"


@pytest.fixture
def skill(tmp_path) -> Path:
    done = opforge("skill", "--to", str(tmp_path / "agent" / "skills"))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "agent" / "skills" / "opforge-kernels" / "SKILL.md"
    assert done.stdout == f"wrote {file}\n"
    return file


def commands(file: Path) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in re.findall(r"^\$ (opforge .*)$", file.read_text(), re.MULTILINE)]


def test_the_skill_has_a_name_a_description_and_commands_that_exist(skill):
    head = re.match(r"---\nname: opforge-kernels\ndescription: (.+)\n---\n", skill.read_text())
    assert head
    assert len(head[1]) < 1024  # what agents read of it before they choose it
    verbs = {(c.name or c.callback.__name__).replace("_", "-") for c in app.registered_commands if c.callback}
    named = {words[0] for words in commands(skill)} | set(re.findall(r"`opforge (\w+)", skill.read_text()))
    assert {"setup", "run", "time", "pack", "reproduce", "trace"} == named <= verbs


def test_a_skill_that_is_there_is_kept(skill):
    skill.write_text("mine")
    done = opforge("skill", "--to", str(skill.parents[1]))
    assert (done.returncode, skill.read_text()) == (2, "mine")
    assert "--force" in done.stderr
    assert opforge("skill", "--to", str(skill.parents[1]), "--force").returncode == 0
    assert "opforge time" in skill.read_text()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = opforge("skill", "--to", str(tmp_path / "file"))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


@pytest.mark.slow
def test_following_the_skill_ships_a_kernel(skill, tmp_path):
    for words in commands(skill):
        done = opforge(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        if words[0] == "setup":
            (tmp_path / "my_kernels/relu/relu_implementation_1.py").write_text(RELU)
    assert list((tmp_path / "dist").glob("*.whl"))
