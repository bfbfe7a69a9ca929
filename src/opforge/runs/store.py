"""The folder of a run: a manifest, and results.jsonl, to which verdicts are appended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from opforge.cache import write_atomically
from opforge.errors import RunDirectoryError
from opforge.runs.manifest import Manifest, PlanRecord
from opforge.runs.rows import ResultRow

MANIFEST = "manifest.json"
RESULTS = "results.jsonl"
_LOCK_NAME = ".lock"


class RunStore:
    """A run's folder, locked by one process at a time.

    The lock ends with the process, however that ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / _LOCK_NAME)
        self._results: TextIO | None = None

    @classmethod
    def create(cls, path: Path, manifest: Manifest) -> RunStore:
        """Start a run in a new or empty folder."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"--out {str(path)!r} cannot be made: {error.strerror}") from None
        if not (path / MANIFEST).exists() and any(p.name != _LOCK_NAME for p in path.iterdir()):
            raise RunDirectoryError(f"{str(path)!r} is not empty; --out needs a new folder")
        store = cls(path)
        store._acquire()
        if (path / MANIFEST).exists():
            store.close()
            raise RunDirectoryError(
                f"{str(path)!r} already holds a run; continue with `--resume {path}`, or give another --out"
            )
        store.write_manifest(manifest)
        store._open()
        return store

    @classmethod
    def reopen(cls, path: Path) -> RunStore:
        """Resume an interrupted run; a partial last line, left by a killed process, is dropped."""
        if not (path / MANIFEST).is_file():
            raise RunDirectoryError(f"{str(path)!r} holds no run (no {MANIFEST}); start one with --out")
        store = cls(path)
        store._acquire()
        _drop_partial_line(path / RESULTS)
        store._open()
        return store

    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def write_manifest(self, manifest: Manifest) -> None:
        write_atomically(self.path / MANIFEST, json.dumps(manifest.wire(), indent=2))

    def restart(self, plan: PlanRecord) -> None:
        """Drop all verdicts and conclusions: the run starts over with another plan."""
        self.write_manifest(replace(self.manifest(), plan=plan, finished=None, scores=None, proofs=None))
        if self._results is not None:
            self._results.truncate(0)

    def append(self, rows: Iterable[ResultRow]) -> None:
        """Append verdicts; they are complete in the file when this returns."""
        if self._results is None:
            raise RunDirectoryError(f"the run in {str(self.path)!r} is closed")
        self._results.write("".join(json.dumps(row.wire(), separators=(",", ":")) + "\n" for row in rows))
        self._results.flush()

    def rows(self) -> Iterator[ResultRow]:
        return read_rows(self.path)

    def close(self) -> None:
        results, self._results = self._results, None
        try:
            if results is not None:
                results.close()
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunDirectoryError(
                f"another run is writing to {str(self.path)!r}; wait for it, or give another --out"
            ) from None

    def _open(self) -> None:
        self._results = (self.path / RESULTS).open("a", encoding="utf-8")


def is_locked(path: Path) -> bool:
    """Whether a process is writing to a run's folder; False if unknown.

    Looks the lock up instead of trying to acquire it.
    """
    try:
        inode = (path / _LOCK_NAME).stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return re.search(rf":{inode} \d+ \w+$", locks, re.MULTILINE) is not None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a run."""
    try:
        return Manifest.from_wire(json.loads((path / MANIFEST).read_text()))
    except OSError as error:
        raise RunDirectoryError(f"{str(path)!r} holds no run ({MANIFEST}: {error.strerror})") from None
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path / MANIFEST} is broken: {error}") from None
    except KeyError as error:
        raise RunDirectoryError(f"{path / MANIFEST} is broken: it has no {error}") from None


def read_rows(path: Path, start: int = 0, on_offset: Callable[[int], None] | None = None) -> Iterator[ResultRow]:
    """Yield the verdicts of a run one at a time, starting at a byte offset of its file.

    ``on_offset`` is called with the offset of the next line.
    """
    try:
        handle = (path / RESULTS).open("rb")
    except FileNotFoundError:
        return
    decode = json.JSONDecoder().decode
    with handle:
        handle.seek(start)
        for number, line in enumerate(handle, 1):
            if not line.endswith(b"\n"):
                return  # this line is still being written
            try:
                row = ResultRow.from_wire(decode(line.decode()))
            except (ValueError, TypeError) as error:
                raise RunDirectoryError(f"{path / RESULTS}, line {number} is broken: {error}") from None
            except KeyError as error:
                raise RunDirectoryError(f"{path / RESULTS}, line {number} is broken: it has no {error}") from None
            if on_offset is not None:
                start += len(line)
                on_offset(start)
            yield row


def _drop_partial_line(results: Path) -> None:
    """Cut off an incomplete last line."""
    if not results.exists():
        return
    with results.open("rb+") as handle:
        size = handle.seek(0, os.SEEK_END)
        length = size
        while length:
            start = max(0, length - (1 << 16))
            handle.seek(start)
            cut = handle.read(length - start).rfind(b"\n")
            if cut >= 0:
                length = start + cut + 1
                break
            length = start
        handle.truncate(length)
