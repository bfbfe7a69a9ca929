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

from opforge.procs import linux
from opforge.sandbox.guard import readable_paths
from opforge.sandbox.guard.confinement import Confinement
from opforge.sandbox.host import folders
from opforge.sandbox.host.client import Spawner

MAX_PROCESSES = 128
MAX_BYTES = 4 << 30
_MAX_FILES = 200_000
_CHECK_INTERVAL_S = 0.2
_MAX_INSPECTED_PROCESSES = 16
"""Maximum processes of a worker that are inspected at a time."""


class WorkerFolders:
    """Folders of one judge. A replacement worker finds the code its predecessor compiled."""

    def __init__(self, spawner: Spawner, *, run: str, held: bool) -> None:
        self._root = spawner.folder()
        self._run = run
        self._fully_protected = held
        self._job: str | None = None
        self._baseline: str | None = None

    def kernel_confinement(self, file: str | None, library: str | None = None) -> Confinement:
        """Return the confinement of the current job's kernel."""
        if self._job is None:
            self._job = tempfile.mkdtemp(dir=self._root)
        return self._confinement(self._job, file, library)

    def baseline_confinement(self) -> Confinement:
        """Return the confinement of ATen's process, which lives as long as the judge."""
        if self._baseline is None:
            self._baseline = tempfile.mkdtemp(dir=self._root)
        return Confinement(self._baseline, (), self._run, self._fully_protected)

    def reference_confinement(self, file: str | None, library: str | None = None) -> Confinement:
        """Return a new confinement for a user's reference, or a user's file that makes inputs."""
        return self._confinement(tempfile.mkdtemp(dir=self._root), file, library)

    def _confinement(self, folder: str, file: str | None, library: str | None) -> Confinement:
        reads, lists = readable_paths.kernel_readable_paths(file, library), readable_paths.kernel_listable_folders(file)
        return Confinement(folder, tuple(reads), self._run, self._fully_protected, tuple(lists))

    def shared_confinement(
        self, files: Iterable[tuple[str | None, str | None]], import_folder: str | None = None
    ) -> Confinement:
        """Return a new confinement for a process that runs several files of users.

        Each file has its library if it was compiled. Imports from ``import_folder`` are allowed.
        """
        files = list(files)
        reads = dict.fromkeys(
            path for file, library in files for path in readable_paths.kernel_readable_paths(file, library)
        )
        lists = dict.fromkeys(path for file, _ in files for path in readable_paths.kernel_listable_folders(file))
        lists |= dict.fromkeys(readable_paths.listable(import_folder) if import_folder else ())
        return Confinement(
            tempfile.mkdtemp(dir=self._root), tuple(reads), self._run, self._fully_protected, tuple(lists)
        )

    def remove_job_folder(self) -> None:
        """Remove the job's folder."""
        if self._job is not None:
            folders.remove(self._job)
            self._job = None


class QuotaGuard:
    """Checks now and then what per-process limits do not bound: process count and storage."""

    def __init__(self, pid: int, folder: str) -> None:
        self._pid = pid
        self._folder = folder
        self._next_check = 0.0
        self._processes: list[int] = []
        self._used, self._files = self._storage()

    def is_due(self, *, force: bool = False) -> bool:
        """Whether to check again: not within a moment of the last check, unless ``force``."""
        now = time.monotonic()
        if now < self._next_check and not force:
            return False
        self._next_check = now + _CHECK_INTERVAL_S
        return True

    def sample_children(self) -> list[int]:
        """Return some of the processes that the worker has started, as of the last check."""
        children = [pid for pid in self._processes if pid != self._pid]
        return random.sample(children, min(len(children), _MAX_INSPECTED_PROCESSES))

    def exceeded_quota(self) -> str | None:
        """Describe the quota that the worker exceeds; None if it exceeds none."""
        self._processes = self._worker_processes()
        count = len(self._processes)
        if count > MAX_PROCESSES:
            return f"it had started {count} processes; {MAX_PROCESSES} are allowed"
        return self._stored_too_much()

    def _worker_processes(self) -> list[int]:
        """Return the worker's process and all its descendants, detached or not."""
        mark = linux.mark_of(self._pid)
        just_forked = mark == linux.mark_of(os.getpid()) or mark == linux.mark_of(os.getppid())
        return [] if mark is None or just_forked else linux.pids_with_mark(mark)

    def _stored_too_much(self) -> str | None:
        used, files = self._storage()
        if used - self._used <= MAX_BYTES and files - self._files <= _MAX_FILES:
            return None
        self._used, self._files = used, files  # if others stored it, do not count it again
        stored, entries = folders.measure(self._folder, _MAX_FILES)
        stored += sum(self._deleted_file_sizes().values())
        if stored > MAX_BYTES:
            return f"it had stored {stored / 2**30:.1f} GiB in its folder; {MAX_BYTES / 2**30:.0f} GiB are allowed"
        if entries > _MAX_FILES:
            return f"it had made more than {_MAX_FILES} files"
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
