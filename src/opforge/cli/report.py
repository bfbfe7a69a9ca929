"""`opforge report`: show a run again, and write its report files anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    format_: Annotated[str, typer.Option("--format", help="text, json, markdown or html.")] = "text",
) -> int:
    """Show a finished or broken-off run, from what its folder holds."""
    from opforge.reports.files import overall, write_all
    from opforge.runs.score import Summary
    from opforge.runs.store import read_manifest, read_rows

    manifest = read_manifest(run)
    summary = Summary.of(manifest, read_rows(run))
    if format_ == "json":
        sys.stdout.write(json.dumps(summary.scores(), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(overall(manifest, summary))
    elif format_ == "html":
        from opforge.reports.page import PAGE

        sys.stdout.write(f"{(run / PAGE).resolve()}\n")
    elif format_ == "text":
        from opforge.reports.terminal import console_for_results, show

        console = console_for_results()
        show(console, manifest, summary)
        judged, planned = summary.case_counts.total(), manifest["plan"]["cases"]
        if judged < planned:
            console.print(
                f"[yellow]unfinished[/yellow]   {judged} of {planned} cases judged; go on with `opforge run --resume {run}`",
                soft_wrap=True,
            )
    else:
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json, markdown, html")
    write_all(run, summary)
    return summary.exit_code
