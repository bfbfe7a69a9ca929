"""Folders of a judge's workers, one for each job, and quotas on what a worker may use."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from opforge import processes
from opforge.sandbox import folders, reach
from opforge.sandbox.client import Spawner
from opforge.sandbox.confinement import Room

MAX_PROCESSES = 128
MAX_BYTES = 4 << 30
_MAX_ENTRIES = 200_000
_PAUSE_S = 0.2
_MAX_INSPECTED_PROCESSES = 16
"""Maximum processes of a worker that are inspected at a time."""


class Rooms:
    """Folders of one judge. A replacement worker finds the code its predecessor compiled."""

    def __init__(self, spawner: Spawner, *, run: str, held: bool) -> None:
        self._root = spawner.folder()
        self._run = run
        self._held = held
        self._job: str | None = None
        self._baseline: str | None = None

    def for_kernel(self, file: str | None, library: str | None = None) -> Room:
        """Return the confinement of the current job's kernel."""
        if self._job is None:
            self._job = tempfile.mkdtemp(dir=self._root)
        return self._kernel_room(self._job, file, library)

    def baseline(self) -> Room:
        """Return the confinement of ATen's process, which lives as long as the judge."""
        if self._baseline is None:
            self._baseline = tempfile.mkdtemp(dir=self._root)
        return Room(self._baseline, (), self._run, self._held)

    def reference(self, file: str | None, library: str | None = None) -> Room:
        """Return a new confinement for a user's reference, or a user's file that makes inputs."""
        return self._kernel_room(tempfile.mkdtemp(dir=self._root), file, library)

    def _kernel_room(self, folder: str, file: str | None, library: str | None) -> Room:
        reads, lists = reach.kernel_reads(file, library), reach.kernel_lists(file)
        return Room(folder, tuple(reads), self._run, self._held, tuple(lists))

    def shared(self, files: Iterable[tuple[str | None, str | None]], imports: str | None = None) -> Room:
        """Return a new confinement for a process that runs several files of users.

        Each file has its library if it was compiled. Imports from folder ``imports`` are allowed.
        """
        files = list(files)
        reads = dict.fromkeys(path for file, library in files for path in reach.kernel_reads(file, library))
        lists = dict.fromkeys(path for file, _ in files for path in reach.kernel_lists(file))
        lists |= dict.fromkeys(reach.listed(imports) if imports else ())
        return Room(tempfile.mkdtemp(dir=self._root), tuple(reads), self._run, self._held, tuple(lists))

    def clear(self) -> None:
        """Remove the job's folder."""
        if self._job is not None:
            folders.remove(self._job)
            self._job = None


class Guard:
    """Checks now and then what per-process limits do not bound: process count and storage."""

    def __init__(self, pid: int, folder: str) -> None:
        self._pid = pid
        self._folder = folder
        self._next = 0.0
        self._processes: list[int] = []
        self._used, self._files = self._storage()

    def is_due(self, *, at_once: bool = False) -> bool:
        """Whether to check again: not within a moment of the last check, unless ``at_once``."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return False
        self._next = now + _PAUSE_S
        return True

    def children(self) -> list[int]:
        """Return some of the processes that the worker has started, as of the last check."""
        children = [pid for pid in self._processes if pid != self._pid]
        return random.sample(children, min(len(children), _MAX_INSPECTED_PROCESSES))

    def excess(self) -> str | None:
        """Describe the quota that the worker exceeds; None if it exceeds none."""
        self._processes = self._worker_processes()
        count = len(self._processes)
        if count > MAX_PROCESSES:
            return f"it had started {count} processes; {MAX_PROCESSES} are allowed"
        return self._stored_too_much()

    def _worker_processes(self) -> list[int]:
        """Return the worker's process and all its descendants, detached or not."""
        mark = processes.mark_of(self._pid)
        just_forked = mark == processes.mark_of(os.getpid()) or mark == processes.mark_of(os.getppid())
        return [] if mark is None or just_forked else processes.marked(mark)

    def _stored_too_much(self) -> str | None:
        used, files = self._storage()
        if used - self._used <= MAX_BYTES and files - self._files <= _MAX_ENTRIES:
            return None
        self._used, self._files = used, files  # if others stored it, do not count it again
        stored, entries = folders.size(self._folder, _MAX_ENTRIES)
        stored += sum(self._deleted_file_sizes().values())
        if stored > MAX_BYTES:
            return f"it had stored {stored / 2**30:.1f} GiB in its folder; {MAX_BYTES / 2**30:.0f} GiB are allowed"
        if entries > _MAX_ENTRIES:
            return f"it had made more than {_MAX_ENTRIES} files"
        return None

    def _storage(self) -> tuple[int, int]:
        """Return the bytes and files in use on the folder's file system, by any process."""
        filesystem = os.statvfs(self._folder)
        return (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize, filesystem.f_files - filesystem.f_ffree

    def _deleted_file_sizes(self) -> dict[tuple[int, int], int]:
        """Return the sizes of deleted files that are still open."""
        sizes: dict[tuple[int, int], int] = {}
        for path in self._open_files():
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
        return sizes

    def _open_files(self) -> Iterator[Path]:
        for pid in self._worker_processes():
            with contextlib.suppress(OSError):
                yield from Path(f"/proc/{pid}/fd").iterdir()
