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
from opforge.reports.escape import indented_line

if TYPE_CHECKING:
    from opforge.runs.reproduce import Reproduction
    from opforge.runs.rows import ResultRow


def register(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    case: Annotated[str, typer.Argument(help="The id of a case, or the start of one.")],
    kernel: Annotated[str | None, typer.Option(help="The kernel, if several were judged on the case.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the results in this new folder.")] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Judge one case of a run again, alone and on the same contents, with the kernel as it is now."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.runs.reproduce import reproduce as judge_again

    with tempfile.TemporaryDirectory(prefix="opforge-reproduce-") as temporary:
        with ProgressLine() as progress:
            again = judge_again(run, case, out or Path(temporary) / "run", kernel=kernel, progress=progress)
        if format_ == "json":
            answer = {"before": again.before.wire(), "now": again.after.wire(), "changed": again.changed}
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        else:
            sys.stdout.write("\n".join(map(indented_line, _lines(run, again))) + "\n")
    return again.exit_code


def _lines(run: Path, again: Reproduction) -> list[str]:
    row = again.before
    lines = [
        f"{row.op} ({row.kernel}), {row.phase}, case {row.id}",
        f"  {row.case}",
        f"in the run   {_verdict_text(row)}",
        f"now          {_verdict_text(again.after)}",
    ]
    if again.changed:
        lines.append(f"changed since the run: {', '.join(again.changed)}")
    elif not again.is_same_verdict:
        lines.append(
            "the kernel has not changed, so the verdict depends on earlier cases, or is not deterministic; to judge "
            f"all cases of the operator, run the command in {shlex.quote(str(run / 'manifest.json'))}, and add "
            f"--ops {row.op}"
        )
    return lines


def _verdict_text(row: ResultRow) -> str:
    return f"{row.verdict}: {row.reason}" if row.reason else row.verdict
