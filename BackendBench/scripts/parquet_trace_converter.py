"""``python -m BackendBench.scripts.parquet_trace_converter``: tables of calls from operator-input logs, and back.

`opforge run --suite FILE` judges either kind. Nothing is downloaded or uploaded, and no call is run.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from BackendBench.scripts import exit_on_error
from opforge.cases.text import LogEntry, parse_log
from opforge.errors import OpforgeError
from opforge.traces.log import is_log
from opforge.traces.problem_table import is_problem_table, log_lines, write_problem_table

MODES = ("trace-to-parquet", "parquet-to-trace")


def convert_trace_to_parquet(trace_file: str | Path, parquet_file: str | Path, limit: int | None = None) -> None:
    """Write a table of the calls in an operator-input log, or of the first operators; unreadable lines are named."""
    path = _local(trace_file)
    if not is_log(path):
        raise OpforgeError(f"{path} is no operator-input log, which begins with 'Operator: NAME'")
    ops: dict[str, list[LogEntry]] = {}
    for entry in parse_log(path.read_text(encoding="utf-8").splitlines()):
        if isinstance(entry, LogEntry):
            ops.setdefault(entry.op, []).append(entry)
        else:
            sys.stderr.write(f"{path.name}: {entry}\n")
    entries = [entry for op in islice(ops, limit) for entry in ops[op]]
    write_problem_table(Path(parquet_file), entries)
    sys.stdout.write(f"wrote {parquet_file}: {len(entries)} calls\n")


def convert_parquet_to_trace(parquet_file: str | Path, trace_file: str | Path, limit: int | None = None) -> None:
    """Write an operator-input log of the calls in a table, or of the first operators."""
    path = _local(parquet_file)
    if not is_problem_table(path):
        raise OpforgeError(f"{path} is no table of calls: Parquet with the columns op_name, args and count")
    lines, operators = [], 0
    for line in log_lines(path):
        operators += line.startswith("Operator:")
        if limit is not None and operators > limit:
            break
        lines.append(line)
    Path(trace_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {trace_file}: {len(lines)} lines\n")


def _local(name: str | Path) -> Path:
    if str(name).startswith(("http://", "https://")):
        raise OpforgeError(f"{name} is not downloaded; download it and name the file")
    if not Path(name).is_file():
        raise OpforgeError(f"there is no file {str(name)!r}")
    return Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--trace-file", required=True, help="operator-input log")
    parser.add_argument("--parquet-name", default="backend_bench_problems.parquet", help="table of calls")
    parser.add_argument("--limit", type=int, help="only the first operators")
    parser.add_argument("--log-level", help="has no effect")
    parser.add_argument("--upload-to-hf", action="store_true", help="refused")
    options = parser.parse_args()
    if options.upload_to_hf:
        raise OpforgeError("--upload-to-hf: opforge uploads nothing; use `hf upload` with the file")
    if options.mode == MODES[0]:
        convert_trace_to_parquet(options.trace_file, options.parquet_name, options.limit)
    else:
        convert_parquet_to_trace(options.parquet_name, options.trace_file, options.limit)


if __name__ == "__main__":
    exit_on_error(main)
