"""Read a file of calls: a trace or an operator-input log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.traces import file, log
from opforge.traces.file import Trace


def check(path: Path) -> None:
    """Raise if a file is neither a trace nor a log."""
    if not path.is_file():
        raise OpforgeError(f"there is no file {path}")
    if file.is_trace(path):
        file.read_about(path)
    elif not log.is_log(path):
        raise OpforgeError(
            f"{path} is neither a trace (as `opforge trace` writes it) nor an operator-input log, which begins with 'Operator: NAME'"
        )


def read_any(path: Path, ops: Iterable[str] | None = None, *, whole: bool = True) -> Trace:
    """Return the calls of a file, for all operators or some."""
    check(path)
    if file.is_trace(path):
        return file.read(path, ops, whole=whole)
    trace = log.read_log(path)
    if ops is None:
        return trace
    wanted = set(ops)
    return Trace([c for c in trace.calls if c.op in wanted], trace.about, trace.losses)
