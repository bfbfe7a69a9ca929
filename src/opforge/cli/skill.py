"""`opforge skill`: a folder that teaches coding agents to write, judge, time and ship kernels."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError

NAME = "opforge-kernels"
_SKILL = Path(__file__).parents[1] / "package" / "skill"


def register(app: typer.Typer) -> None:
    app.command("skill")(skill)


def skill(
    to: Annotated[Path, typer.Option(help="Folder with an agent's skills, for example .claude/skills.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the skill of an earlier version.")] = False,
) -> int:
    """Write a skill folder for coding agents: how to write, judge, time and ship a kernel."""
    target = to / NAME
    if target.exists() and not force:
        raise OpforgeError(f"{str(target)!r} is there already; replace it with --force, or give another --to")
    try:
        to.mkdir(parents=True, exist_ok=True)
        shutil.copytree(_SKILL, target, dirs_exist_ok=True)
    except OSError as error:
        raise OpforgeError(f"--to {str(to)!r} cannot be written: {error.strerror or error}") from None
    sys.stdout.write(f"wrote {target / 'SKILL.md'}\n")
    return 0
