"""Small facts about processes that the standard library does not give: children, parent-death signals, sizes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC_STAT_PARENT = 1


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return [child for child in _all_pids() if _parent(child) == pid] if Path(f"/proc/{pid}").exists() else []


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_PROC_STAT_PARENT])
    except (FileNotFoundError, ProcessLookupError):
        return None


# A worker's mark is a resource limit that nothing uses: every descendant inherits it, through fork and exec alike,
# and it can be read from outside. So an orphan can be told whose it is, however it was started.
def set_mark(mark: int) -> None:
    """Mark this process and its future descendants."""
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (mark, mark))


def mark_of(pid: int) -> int | None:
    """Return the mark of a process, or None when it has gone."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)[0]
    except (ProcessLookupError, PermissionError):
        return None


def virtual_bytes() -> int:
    """Return how much address space this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def describe_status(status: int) -> str:
    """Say in words how a process ended, from the status that waitpid gave."""
    return describe_returncode(os.waitstatus_to_exitcode(status))


def describe_returncode(code: int) -> str:
    """Say in words how a process ended, from its return code, which is the negative signal for one that was killed."""
    if code >= 0:
        return f"exited with status {code}"
    names = {s.value: s.name for s in signal.Signals}
    return f"died of {names.get(-code, 'a real-time signal')} (signal {-code})"
