"""A trace on disk: one Parquet file with a row for each distinct call.

Columns: ``op``, ``args`` (text form; ``at=`` is an offset in the stored bytes), ``count`` (number
of calls), ``input_bytes``, ``result_bytes``, ``flops``, ``source`` (the model and phase with the
most calls), ``digest`` (of its stored contents), ``seen`` (every model and phase, with counts),
``stored_at`` and ``stored`` (offset and contents of the bytes that the row adds to the stored
ones; -1 and none if it adds none).

The file's metadata has a JSON object under ``opforge.trace``: ``format``, ``torch``, ``device``,
``fake``, ``models``, ``command``, ``recorded`` and ``losses`` (why calls were lost, with counts).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opforge.cases.case_files import BlobWriter
from opforge.errors import OpforgeError

FORMAT_VERSION = 1
_KEY = b"opforge.trace"
_MAGIC = b"PAR1"
# in the order of TracedCall's fields
_SCALAR_COLUMNS = ("op", "args", "count", "input_bytes", "result_bytes", "flops", "source", "digest", "stored_at")


@dataclass(frozen=True, slots=True)
class CallCount:
    """How often a call was made by one model in one phase."""

    model: str
    phase: str
    count: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One distinct call of a trace."""

    op: str
    """Full name, with its namespace unless that is ``aten``, as in ``torchvision::nms.default``."""
    args: str
    count: int = 1
    input_bytes: int = 0
    result_bytes: int = 0
    flops: int = 0
    source: str = ""
    digest: str = ""
    stored_at: int = -1
    """Offset of its own stored bytes among those of the file; -1 if it adds none."""
    seen: tuple[CallCount, ...] = ()
    stored: bytes = b""

    @property
    def weight(self) -> int:
        """Return a call's weight in its model's work: its bytes, in and out, times its count."""
        return self.count * max(1, self.input_bytes + self.result_bytes)


@dataclass(frozen=True, slots=True)
class Trace:
    """Distinct calls, metadata of their recording, and counts of calls that were lost."""

    calls: list[TracedCall]
    metadata: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)

    @property
    def operators(self) -> int:
        return len({call.op for call in self.calls})


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = sorted(trace.calls, key=lambda c: (c.op, -c.weight, c.args))
    seen = pa.list_(pa.struct([("model", pa.string()), ("phase", pa.string()), ("count", pa.int64())]))
    columns = {
        **{name: [getattr(c, name) for c in calls] for name in _SCALAR_COLUMNS},
        "seen": pa.array([[asdict(s) for s in c.seen] for c in calls], seen),
        "stored": pa.array([c.stored or None for c in calls], pa.binary()),
    }
    about = {**trace.metadata, "format": FORMAT_VERSION, "losses": trace.losses}
    table = pa.table(columns).replace_schema_metadata({_KEY: json.dumps(about)})
    with atomic_path(path) as draft:
        pq.write_table(table, draft, compression="zstd", compression_level=9)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside a file; it replaces the file if no error is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_trace(path: Path, ops: Iterable[str] | None = None, *, all_columns: bool = True) -> Trace:
    """Return a trace, with all or some of its operators.

    ``all_columns`` includes every model that made a call, and the stored bytes.
    """
    about = read_metadata(path)
    names = [*_SCALAR_COLUMNS, "seen", "stored"] if all_columns else list(_SCALAR_COLUMNS)
    columns = _columns(path, names)
    wanted = None if ops is None else set(ops)
    rows = zip(*columns, strict=True)
    calls = [_call(row) for row in rows if wanted is None or row[0] in wanted]
    return Trace(calls, about, about.pop("losses"))


def _columns(path: Path, names: list[str]) -> list[list[Any]]:
    """Return columns of a file. The imports of `read_table` would take longer than the reading."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as opened:
        table = opened.read(columns=names)
    return [table.column(name).to_pylist() for name in names]


def _call(row: tuple[Any, ...]) -> TracedCall:
    """Return the call of a row; the row's fields are in the order of TracedCall."""
    if len(row) == len(_SCALAR_COLUMNS):
        return TracedCall(*row)
    seen, stored = row[-2:]
    fields = dict(zip(_SCALAR_COLUMNS, row, strict=False))
    return TracedCall(**fields, seen=tuple(CallCount(**s) for s in seen), stored=stored or b"")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a trace file; raise OpforgeError if it is not a trace."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError) as error:
        raise OpforgeError(f"{path} cannot be read as a trace: {error}; make it again with `opforge trace`") from None
    if _KEY not in metadata:
        raise OpforgeError(f"{path} is Parquet, but not a trace; `opforge trace` writes those")
    about: dict[str, Any] = json.loads(metadata[_KEY])
    if about["format"] > FORMAT_VERSION:
        raise OpforgeError(
            f"{path} has format {about['format']}, and this opforge reads up to {FORMAT_VERSION}: it needs a newer one"
        )
    return about


def stored_contents(path: Path) -> list[tuple[int, bytes]]:
    """Return the stored bytes of a trace, with their offsets."""
    offsets, stored = _columns(path, ["stored_at", "stored"])
    return [(offset, contents) for offset, contents in zip(offsets, stored, strict=True) if offset >= 0]


def write_blob(path: Path, stored: Iterable[tuple[int, bytes]], blob: Path) -> None:
    """Write the stored bytes of a file of calls as a blob, for the processes that build its cases."""
    with atomic_path(blob) as draft:
        writer = BlobWriter(draft)
        for offset, contents in sorted(stored):
            if (actual_offset := writer.add(contents, str(offset).encode())) != offset:  # equal contents are kept apart
                raise OpforgeError(
                    f"{path} is damaged: stored bytes of offset {offset} were written at {actual_offset}; make it again"
                )
        writer.close()
