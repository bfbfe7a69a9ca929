"""Confine this process for good: a user of its own where we are root, its own folder, limits, Landlock, a system-call filter.

What the system cannot do is left out; `Abilities` says what it can, and the probe of a run tries it out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge import processes
from opforge.sandbox import landlock, reach, seccomp

MAX_PROCESSES = 256
"""That a worker and its descendants may have at once, threads counted."""
SHARED_PROCESSES = 4 * MAX_PROCESSES
"""That all workers of one user may have at once: the system counts them together, and what one starts is not to be taken from another."""
_MAX_FILE_BYTES = 1 << 30
_MAX_OPEN_FILES = 4096
_FIRST_USER, _USERS = 2_000_000_000, 100_000
_FIRST_MAPPED_USER, _MAPPED_USERS = 61_184, 4_000
"""Where a container maps 65,536 users: a range in which systemd makes up users, and distributions have none."""

_ELSEWHERE = frozenset({
    "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "HELION_CACHE_DIR", "OPFORGE_CACHE",
})  # fmt: skip
"""Variables that would send files to other places; without them all go to the home or temporary folder."""


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's place: the folder that is its own, what it may read besides, and the run's folder, which it is watched for."""

    folder: str
    reads: tuple[str, ...] = ()
    run: str = ""
    held: bool = True
    """Whether everything holds, as the probe found; a verdict then says that nothing was let through."""
    lists: tuple[str, ...] = ()
    """Folders whose names alone it may read, to import from them what it may read."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this system can do."""

    landlock: int
    seccomp: bool
    first_user: int | None
    """Where we are root and may become somebody else: the first of the users that workers become."""
    gpu_groups: frozenset[int]
    """The groups that GPUs are open to."""
    search: int | None
    """Root's capability to read what only root may enter, if we have it."""

    @property
    def signals_scoped(self) -> bool:
        return self.landlock >= landlock.SCOPES_FROM


@functools.cache
def abilities() -> Abilities:
    """Return what this system can do. Ask once before forking, as for `reach.common`."""
    groups = frozenset(os.stat(path).st_gid for path in reach.gpu_devices()) - {0}
    search = next((c for c in processes.SEARCH_CAPABILITIES if processes.has_capabilities(c)), None)
    can = Abilities(landlock.version(), seccomp.supported(), _first_user(), groups, search)
    if can.seccomp:
        seccomp.prepare(own_user=can.first_user is not None)
    return can


def _first_user() -> int | None:
    if os.geteuid() != 0 or not processes.has_capabilities(processes.CAP_SETUID, processes.CAP_SETGID):
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _outside, count = map(int, line.split())
        for user, users in ((_FIRST_USER, _USERS), (_FIRST_MAPPED_USER, _MAPPED_USERS)):
            if first <= user and user + users <= first + count:
                return user
    return None


@functools.cache
def opened() -> landlock.Opened:
    """Return the rules that all workers share, their files opened. Ask once before forking; a worker needs the handles."""
    return landlock.open_all(reach.common() if abilities().landlock else {}, abilities().landlock)


def user_for(folder: str, number: int) -> int | None:
    """Return the user whose folder it is; a new folder is given to one that nothing else runs as. None where we are not root."""
    first = abilities().first_user
    if first is None:
        return None
    user = os.stat(folder).st_uid
    if user < first:
        user = first + number % (_USERS if first == _FIRST_USER else _MAPPED_USERS)
        os.chown(folder, user, user)
    return user


def enter(room: Room, user: int | None, tasks: int | None) -> None:
    """Confine this process to a room, as a user of its own if there is one; ``tasks`` is how many the present user may have."""
    can = abilities()
    own = {**dict.fromkeys(room.lists, landlock.LIST), **dict.fromkeys(room.reads, landlock.READ)}
    own[room.folder] = landlock.OWN
    _limit(tasks if user is None else MAX_PROCESSES)
    processes.offer_to_end_first()
    if user is not None:
        # What stays is the right to read in folders that only root may enter: Landlock says which.
        processes.become(
            user, can.gpu_groups, can.search if can.landlock or _shut_off([*reach.common(), *own]) else None
        )
        processes.die_with_parent()  # which a change of user undoes
    processes.forbid_new_privileges()
    _settle(room.folder)
    if can.landlock:
        if reach.gpu_devices():
            own[_threads()] = landlock.THREADS
        landlock.restrict(opened(), own, can.landlock)
    if can.seccomp:
        seccomp.install(own_user=user is not None, signals_scoped=can.signals_scoped)


def _threads() -> str:
    """Return the folder of this process's threads, whose names CUDA's driver writes, and gives up when it cannot."""
    path = f"/proc/{os.getpid()}/task"
    os.open(
        path, os.O_PATH | os.O_CLOEXEC
    )  # never closed: while it is open, the folder that the rule speaks of stays the same
    return path


def _limit(tasks: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if tasks is not None:
        processes.limit_tasks(tasks)


def _shut_off(paths: Iterable[str]) -> bool:
    """Whether some of the paths that a worker needs can be reached by root alone."""
    for path in {str(parent) for p in paths for parent in (Path(p), *Path(p).parents)}:
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode
            if not mode & 0o001 and not mode & 0o004:
                return True
    return False


def _settle(folder: str) -> None:
    """Make the room the place where temporary files and caches go, and where we are."""
    os.umask(0o077)
    os.chdir(folder)
    for name in _ELSEWHERE.intersection(os.environ):
        del os.environ[name]
    for name, variable in (("home", "HOME"), ("tmp", "TMPDIR")):
        os.environ[variable] = f"{folder}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name)
    tempfile.tempdir = None  # it may remember the server's
    sys.dont_write_bytecode = True


def room_from(request: dict[str, Any]) -> Room:
    """Return the room that a request to the server speaks of."""
    return Room(**{**request, **{name: tuple(request[name]) for name in ("reads", "lists")}})
