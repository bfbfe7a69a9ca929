"""Confine this process for good: its own user if root, its own folder, limits, Landlock, seccomp.

Protections that the system lacks are left out. `Abilities` lists the available ones, and the probe
of a run tests them.
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

from opforge.procs import linux
from opforge.sandbox.guard import landlock, readable_paths, seccomp

MAX_PROCESSES = 256
"""Limit on a worker and its descendants at once, threads included."""
MAX_SHARED_PROCESSES = 4 * MAX_PROCESSES
"""Limit on all workers of one user at once.

The system counts them together, and one worker must not use up another's share.
"""
_MAX_FILE_BYTES = 1 << 30
_MAX_OPEN_FILES = 4096
_FIRST_USER, _USERS = 2_000_000_000, 100_000
_FIRST_MAPPED_USER, _MAPPED_USERS = 61_184, 4_000
"""For containers that map 65,536 users: systemd's dynamic users, unused by distributions."""

_REDIRECTING_VARIABLES = frozenset({
    "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "HELION_CACHE_DIR", "OPFORGE_CACHE",
})  # fmt: skip
"""Variables that would redirect files; without them all go to the home or temporary folder."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """A worker's own folder, its other readable paths, and the run's folder, which is watched."""

    folder: str
    reads: tuple[str, ...] = ()
    run: str = ""
    held: bool = True
    """Whether every protection passed the probe; verdicts then say that all of it was blocked."""
    lists: tuple[str, ...] = ()
    """Folders that the worker may list, to import readable files from them."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Protections that this system supports."""

    landlock: int
    seccomp: bool
    first_user: int | None
    """First of the users that workers become, if we are root and may change users."""
    gpu_groups: frozenset[int]
    """Groups with access to the GPUs."""
    search: int | None
    """Root's capability to read in folders closed to it, if we have it."""

    @property
    def signals_scoped(self) -> bool:
        return self.landlock >= landlock.SCOPES_MIN_VERSION


@functools.cache
def abilities() -> Abilities:
    """Return the protections that this system supports. Call once before forking."""
    groups = frozenset(os.stat(path).st_gid for path in readable_paths.gpu_devices()) - {0}
    search = next((c for c in linux.READ_ANY_FILE_CAPABILITIES if linux.has_capabilities(c)), None)
    can = Abilities(landlock.version(), seccomp.supported(), _first_user(), groups, search)
    if can.seccomp:
        seccomp.prepare(own_user=can.first_user is not None)
    return can


def _first_user() -> int | None:
    if os.geteuid() != 0 or not linux.has_capabilities(linux.CAP_SETUID, linux.CAP_SETGID):
        return None
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _outside, count = map(int, line.split())
        for user, users in ((_FIRST_USER, _USERS), (_FIRST_MAPPED_USER, _MAPPED_USERS)):
            if first <= user and user + users <= first + count:
                return user
    return None


@functools.cache
def shared_rules() -> landlock.OpenedRules:
    """Return the rules shared by all workers, with open files.

    Call once before forking; a worker needs the handles.
    """
    return landlock.open_rules(readable_paths.shared_rights() if abilities().landlock else {}, abilities().landlock)


def user_for(folder: str, number: int) -> int | None:
    """Return the owner of a worker's folder; None if we are not root.

    A new folder is given to a user that nothing else runs as.
    """
    first = abilities().first_user
    if first is None:
        return None
    user = os.stat(folder).st_uid
    if user < first:
        user = first + number % (_USERS if first == _FIRST_USER else _MAPPED_USERS)
        os.chown(folder, user, user)
    return user


def enter(confinement: Confinement, user: int | None, max_tasks: int | None) -> None:
    """Confine this process to its folder, as ``user`` if given.

    ``max_tasks`` is the limit on the current user's processes and threads.
    """
    can = abilities()
    rights = {**dict.fromkeys(confinement.lists, landlock.LIST), **dict.fromkeys(confinement.reads, landlock.READ)}
    rights[confinement.folder] = landlock.OWN_FOLDER
    _limit(max_tasks if user is None else MAX_PROCESSES)
    linux.prefer_oom_kill()
    if user is not None:
        # The capability to read in folders that only root may enter stays: Landlock decides which.
        linux.become_user(
            user,
            can.gpu_groups,
            can.search if can.landlock or _any_root_only([*readable_paths.shared_rights(), *rights]) else None,
        )
        linux.die_with_parent()  # a change of user undoes it
    linux.forbid_new_privileges()
    _set_up_folder(confinement.folder)
    if can.landlock:
        if readable_paths.gpu_devices():
            rights[_threads()] = landlock.THREAD_FOLDER
        landlock.restrict(shared_rules(), rights, can.landlock)
    if can.seccomp:
        seccomp.install(own_user=user is not None, signals_scoped=can.signals_scoped)


def _threads() -> str:
    """Return the folder of this process's threads.

    CUDA's driver writes their names there, and fails if it cannot.
    """
    path = f"/proc/{os.getpid()}/task"
    os.open(path, os.O_PATH | os.O_CLOEXEC)  # never closed, so that the rule's folder stays the same
    return path


def _limit(tasks: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if tasks is not None:
        linux.limit_tasks(tasks)


def _any_root_only(paths: Iterable[str]) -> bool:
    """Whether only root can reach some of the paths that a worker needs."""
    for path in {str(parent) for p in paths for parent in (Path(p), *Path(p).parents)}:
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode
            if not mode & 0o001 and not mode & 0o004:
                return True
    return False


def _set_up_folder(folder: str) -> None:
    """Make the folder the working directory, and the place for temporary files and caches."""
    os.umask(0o077)
    os.chdir(folder)
    for name in _REDIRECTING_VARIABLES.intersection(os.environ):
        del os.environ[name]
    for name, variable in (("home", "HOME"), ("tmp", "TMPDIR")):
        os.environ[variable] = f"{folder}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name)
    tempfile.tempdir = None  # may be cached from the server
    sys.dont_write_bytecode = True


def confinement_from_wire(request: dict[str, Any]) -> Confinement:
    """Return the worker folders in a request to the server."""
    return Confinement(**{**request, **{name: tuple(request[name]) for name in ("reads", "lists")}})
