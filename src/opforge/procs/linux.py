"""Process utilities missing from the standard library: children, parent-death signals, sizes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import secrets
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 1 << 2
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_PROC_STAT_PARENT = 1
_CAPABILITY_VERSION = 0x20080522
_MAX_DESCENDANTS = 4096
_MARK = getattr(resource, "RLIMIT_RTTIME", -1)  # available on Linux
_CPU_CLOCK = 2
"""Clock kind that counts the CPU time of all threads of a process, including ended ones."""

CAP_SETGID, CAP_SETUID = 6, 7
READ_ANY_FILE_CAPABILITIES = (2, 1)
"""Capabilities that let root read folders closed to it.

The first allows reading and searching only, the second writing too.
"""

_LIBC = ctypes.CDLL(None, use_errno=True)
_KERNEL_VARIABLES = ("OPFORGE_BACKEND", "OPFORGE_POLICY")
"""Variables that make ``import torch`` install a package's kernels in place of ATen's."""


def environment_without_kernels() -> dict[str, str]:
    """Return our environment without the variables that install kernels in place of ATen's.

    Kernels are judged against ATen, so ATen must stay in place.
    """
    return {name: value for name, value in os.environ.items() if name not in _KERNEL_VARIABLES}


def remove_kernel_variables() -> str:
    """Remove the kernel-installing variables from our environment; return the named backend."""
    wanted = [os.environ.pop(name, "") for name in _KERNEL_VARIABLES]
    return wanted[0]


def current_core() -> int:
    """Return the number of the core that runs this thread."""
    return int(_LIBC.sched_getcpu())


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, including ended ones."""
    return time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK)


def last_pid() -> bytes:
    """Return the most recently assigned process or thread id on the machine."""
    return _read("/proc/loadavg").split()[-1]


def threads_of(pid: int) -> list[int]:
    """Return the threads of a process; none when it has gone."""
    try:
        return list(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208  # takes a third of the time
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs, or will run before the process is continued."""
    for thread in threads_of(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if _read(f"/proc/{pid}/task/{thread}/stat").rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X"):
                return False
    return True


def descendants_by_mark(pid: int) -> list[int]:
    """Return the live processes that descend from a marked process, including detached ones."""
    mark, parent = mark_of(pid), _parent(pid)
    loose = [c for c in children_of(parent) if c != pid and mark_of(c) == mark] if mark and parent else []
    return [
        *descendants(pid, _MAX_DESCENDANTS),
        *loose,
        *(found for one in loose for found in descendants(one, _MAX_DESCENDANTS)),
    ]


def run_queue_wait_ns(pid: int) -> int:
    """Return the time a process's first thread was ready to run while others had its core.

    The time that its own threads ran meanwhile is subtracted: a process does not make itself wait
    for others. Returns 0 if the system does not report it.
    """
    try:
        ran, waited, *_ = map(int, _read(f"/proc/{pid}/schedstat").split())
        return waited - (cpu_ns(pid) - ran)
    except (OSError, ValueError):
        return 0


def _read(path: str) -> bytes:
    """Return the contents of a short system file, in an eighth of the time of a file object."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _prctl(option: int, value: int, third: int = 0) -> int:
    return int(_LIBC.prctl(option, value, third, 0, 0))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return [child for child in _all_pids() if _parent(child) == pid] if Path(f"/proc/{pid}").exists() else []


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_PROC_STAT_PARENT])
    except (FileNotFoundError, ProcessLookupError):
        return None


def forbid_new_privileges() -> None:
    """Prevent programs started from here from gaining privileges, such as by a set-user-id file."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")


def prefer_oom_kill() -> None:
    """Ask the system to kill this process first when memory runs out."""
    with contextlib.suppress(OSError):
        handle = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(handle, b"1000")
        os.close(handle)


def capabilities() -> int:
    """Return this process's permitted capabilities as a bit mask."""
    found = re.search(r"^CapPrm:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def has_capabilities(*wanted: int) -> bool:
    held = capabilities()
    return all(held >> capability & 1 for capability in wanted)


def become_user(user: int, groups: Iterable[int], kept_capability: int | None) -> None:
    """Become another user permanently, dropping all capabilities except at most one."""
    _prctl(_PR_SET_KEEPCAPS, 1)
    if kept_capability is not None:
        _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)  # else access(2), which compilers call, ignores it
    with contextlib.suppress(PermissionError):  # a user namespace may forbid it; then there are no groups to drop
        os.setgroups(sorted(groups))
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    bits = 0 if kept_capability is None else 1 << kept_capability
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if _LIBC.capset(header, struct.pack("=6I", bits, bits, bits, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capabilities were not given up")
    if kept_capability is not None:
        _prctl(
            _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, kept_capability
        )  # programs that it starts keep the capability too
    _prctl(_PR_SET_DUMPABLE, 1)  # without it /proc/self belongs to root


def count_tasks(user: int) -> int:
    """Return the number of a user's processes and threads visible to this process."""
    count = 0
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == user:
                count += Path(f"/proc/{pid}/task").stat().st_nlink - 2
    return count


def limit_tasks(max_tasks: int) -> None:
    """Limit the number of processes and threads of this process's user.

    The limit applies to this process and its descendants.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    max_tasks = max_tasks if hard == resource.RLIM_INFINITY else min(max_tasks, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (max_tasks, max_tasks))


def descendants(pid: int, max_count: int) -> list[int]:
    """Return the direct and indirect children of a process; stop searching once over ``max_count``."""
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) <= max_count:
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


# A worker's mark is a resource limit that nothing else uses (of real-time scheduling). Every
# descendant inherits it through fork and exec, and it can be read from outside. So the worker of
# an orphan is known, however the orphan was started.
def new_mark() -> int:
    """Return a unique mark.

    It is drawn from a range too large for duplicates, unless somebody has lowered the hard limit.
    """
    _soft, hard = resource.getrlimit(_MARK)
    return 1 + secrets.randbelow((1 << 62 if hard == resource.RLIM_INFINITY else hard) - 1)


def set_mark(mark: int) -> None:
    """Mark this process and its future descendants."""
    resource.setrlimit(_MARK, (mark, mark))


def mark_of(pid: int) -> int | None:
    """Return the mark of a process, or None if it has ended."""
    try:
        return resource.prlimit(pid, _MARK)[0]
    except ProcessLookupError:
        return None
    except PermissionError:  # owned by another user, and root lacks some rights, as in a container
        return _mark_as_shown(pid)


def _mark_as_shown(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^Max realtime timeout\s+(\w+)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) if found[1].isdigit() else resource.RLIM_INFINITY
    return None


def pids_with_mark(mark: int) -> list[int]:
    """Return all processes with a mark."""
    return [pid for pid in _all_pids() if mark_of(pid) == mark]


def virtual_bytes() -> int:
    """Return how much address space this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def describe_status(status: int) -> str:
    """Describe how a process ended, from its waitpid status."""
    return describe_returncode(os.waitstatus_to_exitcode(status))


def describe_returncode(code: int) -> str:
    """Describe how a process ended, from its return code; a negative code is a signal number."""
    if code >= 0:
        return f"exited with status {code}"
    names = {s.value: s.name for s in signal.Signals}
    return f"died of {names.get(-code, 'a real-time signal')} (signal {-code})"
