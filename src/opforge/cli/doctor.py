"""`opforge doctor`: paths, versions and settings of the installation, and what would break with its fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from opforge.package.doctor import Health


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A folder of C++ or CUDA libraries to check as well.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Show paths, versions and settings of the installation; exit with 1 and show the fix if there is a problem."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.package.doctor import examine

    with ProgressLine() as progress:
        health = examine(directory, progress)
    if format_ == "json":
        sys.stdout.write(json.dumps(health.as_json(), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(health)) + "\n")
    return 1 if health.problems else 0


def _lines(health: Health) -> list[str]:
    lines = []
    for section, facts in health.facts.items():
        lines.append(section)
        for name, value in facts.items():
            lines += _fact(name, value)
    lines += [f"note     {note}" for note in health.notes]
    for problem in health.problems:
        lines += [f"problem  {problem.what}", f"  fix    {problem.fix}"]
    count = len(health.problems)
    lines.append(f"{count} problem{'s' * (count > 1)}" if count else "no problems")
    return lines


def _fact(name: str, value: Any) -> list[str]:
    match value:
        case {"version": None, "install": install}:
            return [f"  {name:20} missing: {install}"]
        case {"version": version}:
            return [f"  {name:20} {version}"]
        case [{}, *_]:
            return [line for row in value for line in _row(name, row)]
        case list():
            return [f"  {name:20} {', '.join(map(str, value)) or 'none'}"]
        case bool():
            return [f"  {name:20} {'yes' if value else 'no'}"]
        case _:
            return [f"  {name:20} {'none' if value is None else value}"]


def _row(name: str, row: dict[str, Any]) -> list[str]:
    """Return the lines of a module or a library."""
    title = row.get("name") or row["path"]
    rest = {key: value for key, value in row.items() if key not in ("name", "path") and value not in ("", [])}
    words = [f"{key} {', '.join(value) if isinstance(value, list) else value}" for key, value in rest.items()]
    return [f"  {name.removesuffix('s').replace('librarie', 'library'):20} {title}", *(f"    {word}" for word in words)]
