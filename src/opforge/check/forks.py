"""Run jobs in forked processes, several at a time; a crash or a hang becomes the job's outcome."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from opforge.check.messages import ActionFinished, ActionRaised, Message, from_wire
from opforge.procs import linux

_MAX_OUTPUT_CHARS = 4000
_END_LINE = f"{ActionFinished().wire()}\n".encode()
_Kind = TypeVar("_Kind", bound=Message)

Send = Callable[[Message], None]
"""Sends a message from a forked process to its parent, unbuffered."""


@dataclass
class ForkedJob:
    """An action to run in its own process."""

    key: Any
    action: Callable[[Send], None]
    timeout_s: float


@dataclass
class JobResult:
    """The messages of a job, and how it ended if it failed."""

    key: Any
    messages: list[Message]
    death: str = ""
    """How the process died, if it did not finish."""
    timed_out: bool = False
    output: str = ""
    """End of its printed output."""

    def sent(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the messages of one kind."""
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def error(self) -> str | None:
        """The error that the action raised."""
        return next((message.error for message in self.sent(ActionRaised)), None)


@dataclass
class _RunningJob:
    job: ForkedJob
    pid: int
    read_fd: int
    output: IO[bytes]
    deadline: float
    parts: list[bytes] = field(default_factory=list)


def run_jobs(jobs: Iterable[ForkedJob], workers: int) -> Iterator[JobResult]:
    """Run jobs, up to ``workers`` at a time, and yield each outcome as it ends."""
    waiting = deque(jobs)
    running: dict[int, _RunningJob] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _start(waiting.popleft(), [running_job.read_fd for running_job in running.values()])
                running[started.read_fd] = started
            yield from _step(running)
    finally:
        for running_job in running.values():
            _kill_and_wait(running_job.pid)


def _start(job: ForkedJob, others: list[int]) -> _RunningJob:
    read, write = os.pipe()
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
    pid = os.fork()
    if pid == 0:
        for handle in (read, *others):
            os.close(handle)
        _run_in_child(job, write, output)
    os.close(write)
    return _RunningJob(job, pid, read, output, time.monotonic() + job.timeout_s)


def _run_in_child(job: ForkedJob, write: int, output: IO[bytes]) -> None:
    """Run the action in the fork, in its own process group, then exit."""
    status = 1
    try:
        os.setpgid(0, 0)
        linux.die_with_parent()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

        def send(message: Message) -> None:
            data = f"{message.wire()}\n".encode()
            while data:
                data = data[os.write(write, data) :]

        job.action(send)
        send(ActionFinished())
        status = 0
    except BaseException as error:  # noqa: BLE001  # report any error, then exit
        import traceback

        with contextlib.suppress(BaseException):  # even the text of the error may raise
            os.write(2, traceback.format_exc().encode())
            send(ActionRaised(f"{type(error).__name__}: {error}"[:1000]))
    finally:
        os._exit(status)


def _step(running: dict[int, _RunningJob]) -> Iterator[JobResult]:
    """Wait for output of a process or for the next timeout; yield the outcomes of ended jobs."""
    now = time.monotonic()
    next_deadline = min(running_job.deadline for running_job in running.values())
    ready, _, _ = select.select(list(running), [], [], max(0.0, next_deadline - now))
    for handle in ready:
        part = os.read(handle, 1 << 16)
        running[handle].parts.append(part)
        if not part or part.endswith(_END_LINE):  # an orphaned child of the job may hold the pipe open
            yield _job_result(running.pop(handle), timed_out=False)
    for handle in [h for h, running_job in running.items() if running_job.deadline <= time.monotonic()]:
        yield _job_result(running.pop(handle), timed_out=True)


def _job_result(running_job: _RunningJob, *, timed_out: bool) -> JobResult:
    status = _kill_and_wait(running_job.pid) if timed_out else os.waitpid(running_job.pid, 0)[1]
    _kill_group(running_job.pid)
    os.close(running_job.read_fd)
    lines = b"".join(running_job.parts).split(b"\n")[:-1]  # the last line may be incomplete
    messages = [from_wire(line) for line in lines if line]
    with running_job.output as output:
        output.seek(0)
        printed = output.read().decode(errors="replace")[-_MAX_OUTPUT_CHARS:]
    finished = bool(messages) and isinstance(messages[-1], ActionFinished | ActionRaised)
    died = "" if finished or timed_out else linux.describe_status(status)
    return JobResult(running_job.job.key, messages, died, timed_out and not finished, printed)


def _kill_and_wait(pid: int) -> int:
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
