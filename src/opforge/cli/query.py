"""`opforge query`: ask runs in SQL, or take their results along as Parquet files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from opforge.errors import OpforgeError

_FORMATS = ("text", "json", "csv")


def register(app: typer.Typer) -> None:
    app.command("query")(query)


def query(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or folders with runs in them.")
    ],
    sql: Annotated[
        str | None, typer.Option(help="A query in DuckDB's SQL over the tables `results` and `runs`; - reads stdin.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(help="Write results.parquet and runs.parquet into this folder.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="text, json (a line per row) or csv.")] = "text",
) -> int:
    """Query the results of runs with SQL; docs/queries.md describes the tables and has examples."""
    if format_ not in _FORMATS:
        raise OpforgeError(f"unknown format {format_!r}; allowed: {', '.join(_FORMATS)}")
    if sql is None and parquet is None:
        raise OpforgeError("nothing to do; give --sql QUERY or --parquet FOLDER")
    from opforge.runs.leaderboard import find_runs

    paths = find_runs(folders)
    if parquet is not None:
        from opforge.runs.table import write_parquet

        for file in write_parquet(paths, parquet):
            sys.stdout.write(f"{file}\n")
    if sql is not None:
        from opforge.runs.query import query as run_query

        _show(*run_query(paths, sys.stdin.read() if sql == "-" else sql), format_)
    return 0


def _show(columns: list[str], rows: list[tuple[Any, ...]], format_: str) -> None:
    if format_ == "json":
        for row in rows:
            sys.stdout.write(json.dumps(dict(zip(columns, row, strict=True)), default=str) + "\n")
    elif format_ == "csv":
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([columns, *rows])
    else:
        from opforge.reports.terminal import console_for_results, text_table

        console_for_results().print(text_table(columns, [[_cell(value) for value in row] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
