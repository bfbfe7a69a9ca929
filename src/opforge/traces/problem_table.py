"""Read and write BackendBench's tables: Parquet with one call per row, its arguments as in an operator-input log."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from opforge.cases.text import LogEntry, format_log
from opforge.traces.trace_file import is_parquet

_COLUMNS = ("op_name", "args", "count")


def is_problem_table(path: Path) -> bool:
    """Whether a file is Parquet with the columns of such a table."""
    if not is_parquet(path):
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return set(_COLUMNS) <= set(pq.read_schema(path).names)
    except (pa.ArrowInvalid, OSError):
        return False


def log_lines(path: Path) -> Iterator[str]:
    """Yield the lines of an operator-input log: the calls that the table includes in its benchmark."""
    import pyarrow.parquet as pq

    rows = sorted(pq.read_table(path).to_pylist(), key=lambda row: str(row["op_name"]))
    return format_log(
        LogEntry(row["op_name"], row["count"], row["args"]) for row in rows if row.get("included_in_benchmark", True)
    )


def write_problem_table(path: Path, entries: Iterable[LogEntry]) -> None:
    """Write a table; as in BackendBench, a call that no model made (count 0) is left out of the benchmark."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "uuid": hashlib.sha256(f"{entry.args}{entry.op}".encode()).hexdigest(),
            "op_name": entry.op,
            "args": entry.args,
            "count": entry.count,
            "is_synthetic": entry.count == 0,
            "included_in_benchmark": entry.count > 0,
            "why_excluded": [] if entry.count else ["synthetic"],
        }
        for entry in entries
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
