"""`opforge compare`: hold a run against an earlier one."""

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
            metavar="PERCENT", help="Exit with 1 also for what has surely lost more of its speed, for example 5%."
        ),
    ] = None,
    unchanged: Annotated[
        bool, typer.Option("--unchanged", help="Name slower and faster kernels whose source is the same, too.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="text, json, markdown or junit.")] = "text",
) -> int:
    """Say which operators became wrong, right, slower or faster, appeared or disappeared, as far as the intervals tell."""
    if format_ not in _FORMATS:
        raise OpforgeError(f"unknown format {format_!r}; allowed: {', '.join(_FORMATS)}")
    share = None if fail_on_regression is None else _share(fail_on_regression)

    from opforge.reports import compare as told
    from opforge.runs.compare import compare as hold

    comparison = hold(before, after, unchanged=unchanged)
    if format_ == "json":
        sys.stdout.write(json.dumps(told.as_json(comparison, share), indent=2) + "\n")
    elif format_ == "markdown":
        sys.stdout.write(told.markdown(comparison, share))
    elif format_ == "junit":
        sys.stdout.writelines(told.as_junit(comparison, share))
    else:
        from opforge.reports.terminal import console_for_results

        told.show(console_for_results(), comparison, share)
    return 1 if comparison.regressions(share) else 0


def _share(text: str) -> float:
    """Return the share that a percentage means."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    share = float(found[1]) / 100 if found else -1.0
    if not 0 <= share < 1:
        raise OpforgeError(f"--fail-on-regression {text!r} is no share of the speed; give 0% to 99%, for example 5%")
    return share
