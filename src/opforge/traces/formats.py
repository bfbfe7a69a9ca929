"""Read a file of calls: a trace, an operator-input log or a table of BackendBench's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.traces import log, problem_table, trace_file
from opforge.traces.trace_file import Trace


def check_format(path: Path) -> None:
    """Raise if a file is neither a trace nor a log."""
    if not path.is_file():
        raise OpforgeError(f"there is no file {path}")
    if trace_file.is_parquet(path):
        if not problem_table.is_problem_table(path):
            trace_file.read_metadata(path)
    elif not log.is_log(path):
        raise OpforgeError(
            f"{path} is neither a trace (as `opforge trace` writes it) nor an operator-input log, "
            "which begins with 'Operator: NAME'"
        )


def write_blob(path: Path, blob: Path) -> None:
    """Write the stored bytes of a file's calls as a blob."""
    if trace_file.is_parquet(path) and not problem_table.is_problem_table(path):
        stored = trace_file.stored_contents(path)
    else:
        stored = [(call.stored_at, call.stored) for call in read_calls(path).calls if call.stored]
    trace_file.write_blob(path, stored, blob)


def read_calls(path: Path, ops: Iterable[str] | None = None, *, all_columns: bool = True) -> Trace:
    """Return the calls of a file, for all operators or some."""
    check_format(path)
    if problem_table.is_problem_table(path):
        trace = log.from_log(problem_table.log_lines(path), path.stem)
    elif trace_file.is_parquet(path):
        return trace_file.read_trace(path, ops, all_columns=all_columns)
    else:
        trace = log.read_log(path)
    if ops is None:
        return trace
    wanted = set(ops)
    return Trace([c for c in trace.calls if c.op in wanted], trace.metadata, trace.losses)
