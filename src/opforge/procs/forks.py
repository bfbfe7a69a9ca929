"""Run functions in forks of this process; a crash or a hang is a result like others."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from opforge.procs import child, linux

_MAX_OUTPUT_BYTES = 16 << 20

Send = Callable[[Any], None]
"""Sends a JSON value from a fork to its parent, unbuffered."""


@dataclass(frozen=True, slots=True)
class ForkJob:
    """A function to call in a fork; it may send values, and returns one."""

    action: Callable[[Send], Any]
    limit_s: float
    key: Any = None


@dataclass(frozen=True, slots=True)
class ForkResult:
    """How a fork ended."""

    key: Any
    code: int
    """Exit code; a negative code is a signal number."""
    sent: list[Any]
    answer: Any
    """The function's value; None if it did not return."""
    error: str | None
    """The error that the function raised."""
    death: str
    """How the process died before the function ended; empty if it did not."""
    timed_out: bool
    output: str
    """End of its printed output."""


def run_fork(action: Callable[[Send], Any], limit_s: float) -> ForkResult:
    """Call a function in a fork."""
    (result,) = run_forks([ForkJob(action, limit_s)], 1)
    return result


def run_forks(jobs: Iterable[ForkJob], workers: int) -> Iterator[ForkResult]:
    """Run jobs, up to ``workers`` at a time, and yield each result as it ends."""
    waiting = deque(jobs)
    running: list[_RunningFork] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.popleft(), [fork.pipe for fork in running]))
            yield from _step(running)
    finally:
        for fork in running:
            fork.result(timed_out=True)


def start_fork(action: Callable[[], object], output: int) -> int:
    """Call a function in a fork, and return its PID; it exits with status 1 if the function raises.

    The fork leads a session, dies with this process, has no input, and prints to ``output``.
    """
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        linux.die_with_parent()
        for fd, standard_fd in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(fd, standard_fd)
        action()
        status = 0
    except BaseException:  # noqa: BLE001  # report any error, then exit
        with contextlib.suppress(BaseException):  # even the text of the error may raise
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)  # never continue in the parent's code


def end_session(pid: int) -> int:
    """Kill a child that leads a session, if it still runs, and the session; return its exit code."""
    for kill in (os.killpg, os.kill):  # it may not have its session yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class _RunningFork:
    job: ForkJob
    pid: int
    pidfd: int
    pipe: int
    output: IO[bytes]
    deadline: float
    data: bytearray = field(default_factory=bytearray)
    pipe_open: bool = True

    def fds(self) -> list[int]:
        return [self.pidfd, self.pipe] if self.pipe_open else [self.pidfd]

    def read(self) -> None:
        """Read all that is in the pipe."""
        with contextlib.suppress(BlockingIOError):
            while self.pipe_open:
                part = os.read(self.pipe, 1 << 16)
                self.data += part
                self.pipe_open = bool(part)

    def result(self, *, timed_out: bool) -> ForkResult:
        """End the process, and return its result."""
        code = end_session(self.pid)
        self.read()
        for fd in (self.pidfd, self.pipe):
            os.close(fd)
        with self.output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
            printed = output.read().decode(errors="replace")
        rows = [row for row, _ in child.read_messages(io.BytesIO(self.data))]
        last = {} if not rows or "sent" in rows[-1] else rows.pop()
        death = "" if last or timed_out else linux.describe_returncode(code)
        sent = [row["sent"] for row in rows if "sent" in row]
        return ForkResult(
            self.job.key, code, sent, last.get("answer"), last.get("error"), death, timed_out and not last, printed
        )


def _start(job: ForkJob, other_pipes: list[int]) -> _RunningFork:
    read, write = os.pipe()
    os.set_blocking(read, False)
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended

    def run() -> None:
        for fd in (read, *other_pipes):
            os.close(fd)
        pipe = os.fdopen(write, "wb")

        def send_row(**row: Any) -> None:
            child.send(pipe, row)
            pipe.flush()

        try:
            send_row(answer=job.action(lambda value: send_row(sent=value)))
        except BaseException as error:
            send_row(error=f"{type(error).__name__}: {error}"[:1000])
            raise

    pid = start_fork(run, output.fileno())
    os.close(write)
    return _RunningFork(job, pid, os.pidfd_open(pid), read, output, time.monotonic() + job.limit_s)


def _step(running: list[_RunningFork]) -> Iterator[ForkResult]:
    """Wait for messages or the end of a process, or for a time limit; yield the results of ended jobs."""
    next_deadline = min(fork.deadline for fork in running)
    fds = [fd for fork in running for fd in fork.fds()]
    ready, _, _ = select.select(fds, [], [], max(0.0, next_deadline - time.monotonic()))
    for fork in list(running):
        fork.read()
        ended = fork.pidfd in ready
        if ended or fork.deadline <= time.monotonic():
            running.remove(fork)
            yield fork.result(timed_out=not ended)
