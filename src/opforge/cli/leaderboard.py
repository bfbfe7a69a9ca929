"""`opforge leaderboard`: rank many runs."""

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
    from opforge.reports import leaderboard as reports
    from opforge.runs.leaderboard import leaderboard as make_leaderboard

    ranking = make_leaderboard(folders, by)
    if format_ == "json":
        sys.stdout.write(json.dumps(reports.as_json(ranking), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(reports.markdown(ranking))
    else:
        from opforge.reports.terminal import console_for_results

        reports.print_leaderboard(console_for_results(), ranking)
    return 0 if ranking.boards else 5
