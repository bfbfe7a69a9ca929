"""Query runs in SQL with DuckDB; `opforge.runs.table` makes the tables `results` and `runs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.runs import table


def query(paths: Iterable[Path], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the columns and rows of a query's result."""
    try:
        import duckdb  # an extra of its own, and large
    except ImportError:
        raise OpforgeError("queries need the package duckdb; install it with `pip install 'opforge[duckdb]'`") from None
    paths = list(paths)
    with duckdb.connect(":memory:") as connection:
        tables = {"results": table.results(paths), "runs": table.runs(paths)}
        for name, data in tables.items():
            connection.register("given", data)
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM given")  # noqa: S608  # constant names
            connection.unregister("given")
        try:
            answer = connection.execute(sql)
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            raise OpforgeError(f"the query cannot be answered: {error}") from None
