"""`opforge reproduce`: judge one case of a run again."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError
from opforge.reports.plain import line

if TYPE_CHECKING:
    from opforge.runs.reproduce import Again


def register(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    case: Annotated[str, typer.Argument(help="The id of a case of it, or the beginning of one.")],
    kernel: Annotated[str | None, typer.Option(help="Of which kernel, where several were judged on it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep what comes out in this new folder.")] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Judge one case of a run again, alone, on the same contents; the kernel is taken as it is now."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.runs.reproduce import reproduce as judge

    with tempfile.TemporaryDirectory(prefix="opforge-reproduce-") as temporary:
        with ProgressLine() as progress:
            again = judge(run, case, out or Path(temporary) / "run", kernel=kernel, progress=progress)
        if format_ == "json":
            answer = {"before": again.before, "now": again.now, "changed": again.changed}
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        else:
            sys.stdout.write("\n".join(map(line, _lines(run, again))) + "\n")
    return again.exit_code


def _lines(run: Path, again: Again) -> list[str]:
    row = again.before
    lines = [
        f"{row['op']} ({row['kernel']}), {row['phase']}, case {row['id']}",
        f"  {row['case']}",
        f"in the run   {_said(row)}",
        f"now          {_said(again.now)}",
    ]
    if again.changed:
        lines.append(f"changed since the run: {', '.join(again.changed)}")
    elif not again.same:
        lines.append(
            "the kernel has not changed, so it matters what comes before this case, or it is not sure; a new run judges all cases of the "
            f"operator: see the command in {shlex.quote(str(run / 'manifest.json'))}, and add --ops {row['op']}"
        )
    return lines


def _said(row: dict[str, object]) -> str:
    return f"{row['verdict']}: {row['reason']}" if row["reason"] else str(row["verdict"])
