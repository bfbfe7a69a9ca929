"""Runs as Arrow tables with fixed types.

`results` has a row per verdict and `runs` a row per run. docs/queries.md describes them.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from opforge.runs.compare.compatible import device_name
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary
from opforge.runs.store import read_manifest, read_rows

_BATCH_ROWS = 8192
_TEXT, _FLOAT, _INTEGER, _BOOLEAN = pa.string(), pa.float64(), pa.int64(), pa.bool_()

_MEASUREMENT_TYPE = pa.struct(
    {
        **dict.fromkeys(("kernel_us", "aten_us", "speedup", "low", "high"), _FLOAT),
        **dict.fromkeys(("rounds", "set_aside", "calls"), _INTEGER),
        **dict.fromkeys(("method", "cache"), _TEXT),
    }.items()
)
_ROOFLINE_TYPE = pa.struct(
    {
        **dict.fromkeys(("bytes", "flops"), _INTEGER),
        **dict.fromkeys(("us", "kernel", "aten"), _FLOAT),
        **dict.fromkeys(("bound", "counted"), _TEXT),
    }.items()
)

RESULTS = pa.schema(
    {
        **dict.fromkeys(("run", "backend", "suite", "op", "kernel", "digest", "case", "id", "source"), _TEXT),
        **dict.fromkeys(("phase", "verdict", "reason"), _TEXT),
        **dict.fromkeys(("notes", "variants"), pa.list_(_TEXT)),
        "calls": pa.map_(_TEXT, _INTEGER),
        "raised": _BOOLEAN,
        **dict.fromkeys(("kernel_error", "aten_error", "bound", "rtol", "atol"), _FLOAT),
        **dict.fromkeys(("kernel_residual", "aten_residual", "residual_bound"), _FLOAT),
        **dict.fromkeys(("draws", "elements", "tests", "identical_draws"), _INTEGER),
        **dict.fromkeys(("ks", "ks_limit", "z", "z_limit", "false_alarm"), _FLOAT),
        "timed": _TEXT,
        **dict.fromkeys(("kernel_us", "aten_us", "speedup", "speedup_low", "speedup_high"), _FLOAT),
        "rounds": _INTEGER,
        **dict.fromkeys(("device_time", "call_time", "sync_time"), _MEASUREMENT_TYPE),
        "sol": _ROOFLINE_TYPE,
        "launch_bound": _BOOLEAN,
        **dict.fromkeys(("alarm", "clocks", "ran", "not_replayed"), _TEXT),
    }.items()
)
"""A row per verdict. Fields missing from a line of results.jsonl are null."""

RUNS = pa.schema(
    {
        **dict.fromkeys(("run", "path", "backend", "suite", "suite_digest", "device", "torch", "opforge"), _TEXT),
        **dict.fromkeys(("started", "finished"), pa.timestamp("s", tz="UTC")),
        **dict.fromkeys(("operators", "judged", "right", "missing", "declined", "cases"), _INTEGER),
        **dict.fromkeys(("correctness", "correctness_of_judged", "coverage"), _FLOAT),
        **dict.fromkeys(("performance", "performance_low", "performance_high"), _FLOAT),
        **dict.fromkeys(("p", "perf_at_p", "perf_at_p_low", "perf_at_p_high"), _FLOAT),
    }.items()
)
"""A row per run, finished or not."""

_SOURCE_FIELDS = {"device_time": "device", "call_time": "call", "sync_time": "sync"}


def results(paths: Iterable[Path]) -> pa.RecordBatchReader:
    """Return the verdicts of some runs, read lazily."""
    return pa.RecordBatchReader.from_batches(RESULTS, _batches(paths))


def runs(paths: Iterable[Path]) -> pa.Table:
    """Return some runs, one row each."""
    return pa.Table.from_pylist([_run(path) for path in paths], schema=RUNS)


def write_parquet(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Write both tables as Parquet files into a folder, in constant memory."""
    paths = list(paths)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "results.parquet", folder / "runs.parquet"]
    with pq.ParquetWriter(files[0], RESULTS, compression="zstd") as writer:
        for batch in _batches(paths):
            writer.write_batch(batch)
    pq.write_table(runs(paths), files[1], compression="zstd")
    return files


def _batches(paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        manifest = read_manifest(path)
        digests = {kernel.name: kernel.digest for kernel in manifest.plan.kernels}
        common = {"run": path.resolve().name, "backend": manifest.backend}
        rows = (_row(row, {**common, "digest": digests.get(row.kernel)}) for row in read_rows(path))
        while chunk := list(itertools.islice(rows, _BATCH_ROWS)):
            yield pa.RecordBatch.from_pylist(chunk, schema=RESULTS)


def _row(row: ResultRow, common: dict[str, str | None]) -> dict[str, Any]:
    """Return a result line with the table's types; missing flags are false."""
    result = {**row.wire(), **common, **{name: row.figures.get(old) for name, old in _SOURCE_FIELDS.items()}}
    result["calls"] = list(row.calls.items())
    result["clocks"] = json.dumps(row.figures["clocks"]) if "clocks" in row.figures else None
    result["notes"], result["variants"] = row.notes, row.variants
    result["raised"], result["launch_bound"] = row.raised, row.launch_bound
    return {name: result.get(name) for name in RESULTS.names}


def _run(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    scores = Summary.from_rows(manifest, read_rows(path)).scores()
    low_high = {
        f"{name}_{end}": None if scores[f"{name}_interval"] is None else scores[f"{name}_interval"][index]
        for name in ("performance", "perf_at_p")
        for index, end in enumerate(("low", "high"))
    }
    facts = {
        "run": path.resolve().name,
        "path": str(path.resolve()),
        "backend": manifest.backend,
        "suite": manifest.suite_name,
        "suite_digest": manifest.plan.suite_digest,
        "device": device_name(manifest),
        "torch": manifest.versions["torch"],
        "opforge": manifest.versions["opforge"],
        "started": _time(manifest.started),
        "finished": _time(manifest.finished),
    }
    return {**{name: scores.get(name) for name in RUNS.names}, **low_high, **facts}


def _time(text: str | None) -> dt.datetime | None:
    return None if text is None else dt.datetime.fromisoformat(text)
