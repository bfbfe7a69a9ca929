"""Cases on disk: a Parquet table of calls, and a safetensors file with the stored tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from opforge.cases.case import Case, Expect, Phase

if TYPE_CHECKING:
    from opforge.cases.tensors import Bytes

TABLE_FILE = "cases.parquet"
BLOB_FILE = "tensors.safetensors"
_COLUMNS = ("op", "args", "expect", "phase", "source", "id", "tree")
_EXPECT = {e.value: e for e in Expect}
_PHASE = {p.value: p for p in Phase}


def write_table(path: Path, cases: Iterable[Case]) -> None:
    """Write cases as Parquet: one row per case, text columns, zstd."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[str]] = {name: [] for name in _COLUMNS}
    for case in cases:
        for name in _COLUMNS:
            columns[name].append(str(getattr(case, name)))
    pq.write_table(pa.table({n: pa.array(v, pa.string()) for n, v in columns.items()}), path, compression="zstd")


def read_table(path: Path, ops: Iterable[str] | None = None, *, blob: str = "") -> list[Case]:
    """Return the cases of a table, or those of some operators; ``blob`` names their blob."""
    import pyarrow.parquet as pq

    wanted = None if ops is None else [("op", "in", sorted(ops))]
    if wanted is not None and not wanted[0][2]:
        return []
    table = pq.read_table(path, filters=wanted, columns=list(_COLUMNS))
    rows = zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True)
    return [
        Case(op, args, _EXPECT[expect], _PHASE[phase], source, id_, tree, blob)
        for op, args, expect, phase, source, id_, tree in rows
    ]


class BlobWriter:
    """Writes storages into a safetensors file as one byte tensor; equal contents only once."""

    ALIGN = 64
    _HEADER_BYTES = 4096

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._file.write(b"\0" * self._HEADER_BYTES)
        self._size = 0
        self._seen: dict[bytes, int] = {}

    def add(self, contents: bytes, digest: bytes) -> int:
        """Store bytes and return their offset."""
        if digest in self._seen:
            return self._seen[digest]
        offset = self._size
        padding = -len(contents) % self.ALIGN
        self._file.write(contents)
        self._file.write(b"\0" * padding)
        self._size += len(contents) + padding
        self._seen[digest] = offset
        return offset

    def close(self) -> None:
        """Finish the file by writing its header."""
        header = {"bytes": {"dtype": "U8", "shape": [self._size], "data_offsets": [0, self._size]}}
        text = json.dumps(header).encode().ljust(self._HEADER_BYTES - 8)
        self._file.seek(0)
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.close()


def open_blob(path: Path) -> Bytes:
    """Map the bytes of a blob read-only."""
    import numpy as np  # not above: it slows the start of the command line by a quarter

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    (size,) = header["bytes"]["shape"]
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset=8 + length, shape=(size,))
