"""`opforge report`: show a run again, and write its report files anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from opforge.runs.manifest import Manifest


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def _why_empty(manifest: Manifest, run: Path) -> str:
    if manifest.plan.cases:
        return f"none of its {manifest.plan.cases} cases is judged; continue with `opforge run --resume {run}`"
    return "; ".join(["no kernel was judged", *manifest.plan.remarks])


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    format_: Annotated[str, typer.Option("--format", help="text, json, markdown or html.")] = "text",
) -> int:
    """Show a finished or interrupted run from its folder."""
    from opforge.reports.run_files import summary_markdown, write_reports
    from opforge.runs.score import Summary
    from opforge.runs.store import read_manifest, read_rows

    manifest = read_manifest(run)
    summary = Summary.from_rows(manifest, read_rows(run))
    if format_ == "json":
        sys.stdout.write(json.dumps(summary.scores(), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(summary_markdown(manifest, summary))
    elif format_ == "html":
        from opforge.reports.page import PAGE_FILE

        sys.stdout.write(f"{(run / PAGE_FILE).resolve()}\n")
    elif format_ == "text":
        from opforge.reports.terminal import console_for_results, print_run

        console = console_for_results()
        print_run(console, manifest, summary)
        judged, planned = summary.case_counts.total(), manifest.plan.cases
        if judged < planned:
            console.print(
                f"[yellow]unfinished[/yellow]   {judged} of {planned} cases judged; continue with `opforge run "
                f"--resume {run}`",
                soft_wrap=True,
            )
    else:
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json, markdown, html")
    write_reports(run, summary)
    if not summary.case_counts:
        sys.stderr.write(f"opforge: the run in {run} has no results: {_why_empty(manifest, run)}\n")
    return summary.exit_code
