"""`opforge compare`: compare a run with an earlier one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError

_FORMATS = ("text", "json", "markdown", "junit")


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    before: Annotated[Path, typer.Argument(help="The folder of the earlier run.")],
    after: Annotated[Path, typer.Argument(help="The folder of the later run.")],
    fail_on_regression: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Also exit with 1 for slowdowns significantly above this, for example 5%."
        ),
    ] = None,
    unchanged: Annotated[
        bool, typer.Option("--unchanged", help="Also list speed changes of kernels with unchanged source.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="text, json, markdown or junit.")] = "text",
) -> int:
    """List operators that became wrong, right, slower or faster (by confidence intervals), appeared or disappeared."""
    if format_ not in _FORMATS:
        raise OpforgeError(f"unknown format {format_!r}; allowed: {', '.join(_FORMATS)}")
    share = None if fail_on_regression is None else _parse_percentage(fail_on_regression)

    from opforge.reports import compare as reports
    from opforge.runs.compare.comparison import compare as compare_runs

    comparison = compare_runs(before, after, report_unchanged=unchanged)
    if format_ == "json":
        sys.stdout.write(json.dumps(reports.as_json(comparison, share), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(reports.markdown(comparison, share))
    elif format_ == "junit":
        sys.stdout.writelines(reports.as_junit(comparison, share))
    else:
        from opforge.reports.terminal import console_for_results

        reports.print_comparison(console_for_results(), comparison, share)
    return 1 if comparison.regressions(share) else 0


def _parse_percentage(text: str) -> float:
    """Return the share that a percentage means."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    share = float(match[1]) / 100 if match else -1.0
    if not 0 <= share < 1:
        raise OpforgeError(f"--fail-on-regression {text!r} is not a percentage below 100%; give for example 5%")
    return share
