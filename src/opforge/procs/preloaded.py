"""A process that has imported what later processes need, and forks one of them for each question.

Importing torch and what builds on it takes seconds; a fork takes milliseconds. What a fork does to
its memory, its environment or its files does not reach the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.procs.child import MessageReader, settings_read_at_import

_START_LIMIT_S = 300.0


class PreloadError(OpforgeError):
    """The process that forks others has ended."""

    exit_code = 1


class PreloadedProcess:
    """The process that forks, for the one that asks. One fork at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; the last argument of its command is the descriptor of its socket."""
        self._settings = settings_read_at_import(environment)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        ours, theirs = Channel.pair()
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output,
            pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._channel = ours
        self._fork: _Fork | None = None
        self._was_interrupted = False
        """Whether a fork was asked for, and its parent does not know that we know it."""
        atexit.register(self.close)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it can fork a process with this environment."""
        is_free = not self._was_interrupted and (self._fork is None or self._fork.has_ended)
        return self._process.poll() is None and is_free and self._settings == settings_read_at_import(environment)

    def ask(self, question: Any, environment: Mapping[str, str], *, limit_s: float | None) -> MessageReader:
        """Fork a process for a question; it may be silent for ``limit_s``."""

        def start(pipe: int, output: int) -> _Fork:
            request = {"question": question, "environment": dict(environment), "folder": str(Path.cwd())}
            self._was_interrupted = True
            try:
                self._channel.send(request, [pipe, output])
                self._fork = _Fork(int(self._channel.receive(_START_LIMIT_S)["pid"]), self._channel)
            except (ChannelClosedError, TimeoutError):
                raise PreloadError(self._last_words()) from None
            return self._fork

        reader = MessageReader(start, limit_s=limit_s, own_group=True)
        self._channel.send({"watched": True})  # its end is reported from now on
        self._was_interrupted = False
        return reader

    def _last_words(self) -> str:
        self._process.kill()
        ending = linux.describe_returncode(self._process.wait())
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip()
        return f"the process that imports torch {ending}: {printed[-1000:]}"

    def close(self) -> None:
        """Hang up; the process ends."""
        atexit.unregister(self.close)
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


class ForkingModule:
    """A module that is run as a ``PreloadedProcess``, from the first question on.

    Its process is replaced if it has ended, or if the environment has changed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: PreloadedProcess | None = None

    def ask(self, question: Any, environment: Mapping[str, str], *, limit_s: float | None) -> MessageReader:
        """Fork a process for a question; it may be silent for ``limit_s``."""
        if self._process is not None and not self._process.fits(environment):
            self.end()
        if self._process is None:
            command = [sys.executable, "-P", "-W", "ignore", "-m", self._name]
            self._process = PreloadedProcess(command, environment)
        return self._process.ask(question, environment, limit_s=limit_s)

    def end(self) -> None:
        """End its process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None


class _Fork:
    """A forked process, whose end its parent reports."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self._channel = channel
        self._status: int | None = None

    @property
    def has_ended(self) -> bool:
        return self._status is not None

    def poll(self) -> int | None:
        if self._status is None and select.select([self._channel], [], [], 0)[0]:
            self.wait()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            try:
                self._status = int(self._channel.receive(timeout)["status"])
            except TimeoutError:
                raise subprocess.TimeoutExpired([], timeout or 0.0) from None
            except ChannelClosedError:
                self._status = -signal.SIGKILL  # it dies with its parent
        return self._status


def serve_forks(channel: Channel, prepare: Callable[[Any], None], answer: Callable[[Any, int], NoReturn]) -> None:
    """Fork a process for each question, until the other side hangs up.

    ``prepare`` imports what the question's answer needs. In the fork, ``answer`` gets the question
    and the pipe for its messages.
    """
    linux.die_with_parent()
    while True:
        try:
            request, fds = channel.receive_with_fds()
        except ChannelClosedError:
            return
        prepare(request["question"])
        gc.collect()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become_child(request, fds[1])
            answer(request["question"], fds[0])
        with contextlib.suppress(OSError):  # it may have ended
            os.setpgid(pid, pid)  # here too, as nobody knows who comes first
        for fd in fds:
            os.close(fd)
        try:
            channel.send({"pid": pid})
            channel.receive()
            _, status = os.waitpid(pid, 0)
            channel.send({"status": os.waitstatus_to_exitcode(status)})
        except ChannelClosedError:
            return


def _become_child(request: Mapping[str, Any], output: int) -> None:
    """Have the environment, the folder and the output file of the process that asks."""
    linux.die_with_parent()
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # may be cached
    os.chdir(request["folder"])
    gc.unfreeze()
