"""`opforge leaderboard`: many runs beside each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError

_FORMATS = ("text", "json", "markdown")


def register(app: typer.Typer) -> None:
    app.command("leaderboard")(leaderboard)


def leaderboard(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or folders with runs in them.")
    ],
    by: Annotated[
        str, typer.Option(help="Score to rank by: correctness, performance, common, perf_at_p or coverage.")
    ] = "correctness",
    format_: Annotated[str, typer.Option("--format", help="text, json or markdown.")] = "text",
) -> int:
    """Rank runs on the same cases and device; other runs are ranked separately."""
    if format_ not in _FORMATS:
        raise OpforgeError(f"unknown format {format_!r}; allowed: {', '.join(_FORMATS)}")
    from opforge.reports import leaderboard as told
    from opforge.runs.leaderboard import leaderboard as ranked

    found = ranked(folders, by)
    if format_ == "json":
        sys.stdout.write(json.dumps(told.as_json(found), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(told.markdown(found))
    else:
        from opforge.reports.terminal import console_for_results

        told.print_leaderboard(console_for_results(), found)
    return 0 if found.boards else 5
