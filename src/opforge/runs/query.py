"""Query runs in SQL with DuckDB; `opforge.runs.table` makes the tables `results` and `runs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.runs import table
from opforge.runs.rows import OLD_FIELDS


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
            try:
                answer = connection.execute(sql)
            except duckdb.BinderException as error:
                if not any(f'"{old}"' in str(error) for old in OLD_FIELDS):
                    raise
                aliases = ", ".join(f"{new} AS {old}" for old, new in OLD_FIELDS.items())
                connection.execute(f"CREATE OR REPLACE TABLE results AS SELECT *, {aliases} FROM results")  # noqa: S608
                answer = connection.execute(sql)
            return [column[0] for column in answer.description or ()], answer.fetchall()
        except duckdb.Error as error:
            raise OpforgeError(f"the query failed: {error}") from None
