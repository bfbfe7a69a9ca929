"""Run jobs in forked processes, several at a time; a crash or a hang becomes the job's outcome."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from opforge import processes

_MOST_SAID = 4000
_END_ROW = b'{"end": true}\n'

Tell = Callable[[dict[str, Any]], None]
"""Sends a row from a forked process to its parent, unbuffered."""


@dataclass
class Job:
    """An action to run in its own process."""

    key: Any
    action: Callable[[Tell], None]
    limit_s: float


@dataclass
class Outcome:
    """The rows a job sent, and how it ended if it failed."""

    key: Any
    rows: list[dict[str, Any]]
    died: str = ""
    """How the process died, if it did not finish."""
    late: bool = False
    said: str = ""
    """End of its printed output."""


@dataclass
class _RunningJob:
    job: Job
    pid: int
    handle: int
    output: IO[bytes]
    until: float
    parts: list[bytes] = field(default_factory=list)


def run(jobs: Iterable[Job], workers: int) -> Iterator[Outcome]:
    """Run jobs, up to ``workers`` at a time, and yield each outcome as it ends."""
    waiting = deque(jobs)
    running: dict[int, _RunningJob] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _start(waiting.popleft(), [running_job.handle for running_job in running.values()])
                running[started.handle] = started
            yield from _step(running)
    finally:
        for running_job in running.values():
            _end(running_job.pid)


def _start(job: Job, others: list[int]) -> _RunningJob:
    read, write = os.pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
    pid = os.fork()
    if pid == 0:
        for handle in (read, *others):
            os.close(handle)
        _work(job, write, output)
    os.close(write)
    return _RunningJob(job, pid, read, output, time.monotonic() + job.limit_s)


def _work(job: Job, write: int, output: IO[bytes]) -> None:
    """Run the action in the fork, in its own process group, then exit."""
    status = 1
    try:
        os.setpgid(0, 0)
        processes.die_with_parent()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

        def tell(row: dict[str, Any]) -> None:
            data = (json.dumps(row) + "\n").encode()
            while data:
                data = data[os.write(write, data) :]

        job.action(tell)
        tell({"end": True})
        status = 0
    except BaseException as error:  # noqa: BLE001  # report any error, then exit
        import traceback

        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
            tell({"fault": f"{type(error).__name__}: {error}"[:1000], "trace": traceback.format_exc()[-3000:]})
    finally:
        os._exit(status)


def _step(running: dict[int, _RunningJob]) -> Iterator[Outcome]:
    """Wait for output of a process or for the next timeout; yield the outcomes of ended jobs."""
    now = time.monotonic()
    next_deadline = min(running_job.until for running_job in running.values())
    ready, _, _ = select.select(list(running), [], [], max(0.0, next_deadline - now))
    for handle in ready:
        part = os.read(handle, 1 << 16)
        running[handle].parts.append(part)
        if not part or part.endswith(_END_ROW):  # an orphaned child of the job may hold the pipe open
            yield _ended(running.pop(handle), late=False)
    for handle in [h for h, running_job in running.items() if running_job.until <= time.monotonic()]:
        yield _ended(running.pop(handle), late=True)


def _ended(running_job: _RunningJob, *, late: bool) -> Outcome:
    status = _end(running_job.pid) if late else os.waitpid(running_job.pid, 0)[1]
    _kill_group(running_job.pid)
    os.close(running_job.handle)
    lines = b"".join(running_job.parts).split(b"\n")[:-1]  # the last line may be incomplete
    rows = [json.loads(line) for line in lines if line]
    with running_job.output as output:
        output.seek(0)
        printed = output.read().decode(errors="replace")[-_MOST_SAID:]
    finished = bool(rows) and ("end" in rows[-1] or "fault" in rows[-1])
    died = "" if finished or late else processes.describe_status(status)
    return Outcome(running_job.job.key, [row for row in rows if "end" not in row], died, late and not finished, printed)


def _end(pid: int) -> int:
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, 0)[1]
    return 0


def _kill_group(pid: int) -> None:
    """Kill the processes that the job started and left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
