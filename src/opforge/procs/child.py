"""Child processes: their environment, their messages, and a time limit for them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from opforge.errors import OpforgeError
from opforge.procs import linux

_HEADER = struct.Struct("<II")
"""Header of each message: the length of its JSON and of the bytes after it."""
_MAX_READ_BYTES = 1 << 20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def child_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which Python finds this opforge, installed or not."""
    package = str(Path(__file__).resolve().parents[2])
    return {**base, "PYTHONPATH": os.pathsep.join(filter(None, [package, base.get("PYTHONPATH", "")]))}


_READ_AT_IMPORT = (
    "LD_LIBRARY_PATH", "HOME", "CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONOPTIMIZE",
    "PYTHONMALLOC", "PYTHONUTF8", "PYTHONDEVMODE", "PYTHONWARNINGS", "PYTHONNOUSERSITE", "PYTHONSAFEPATH",
)  # fmt: skip
"""Variables that take effect when Python, torch or Triton is imported."""
_READ_AT_IMPORT_PREFIXES = ("TORCH", "TRITON_", "HELION_", "OMP_", "MKL_", "MALLOC_")


def settings_read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that take effect before a process forks others. All others can be passed on to forks."""
    return {
        name: value
        for name, value in environment.items()
        if name in _READ_AT_IMPORT or name.startswith(_READ_AT_IMPORT_PREFIXES)
    }


def run_command(
    command: Sequence[str], *, label: str, limit_s: float, question: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a question on its stdin; raise if it takes longer than its limit."""
    try:
        return subprocess.run(command, input=question, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise OpforgeError(f"{label} took more than {limit_s:g} s") from None


def send(pipe: BinaryIO, message: Any, contents: bytes = b"") -> None:
    """Send a JSON value, with paths as text; it may stay in the pipe's buffer until a flush."""
    body = json.dumps(message, default=os.fspath).encode()
    pipe.write(_HEADER.pack(len(body), len(contents)) + body + contents)


def read_messages(file: _Readable) -> Iterator[tuple[Any, bytes]]:
    """Yield the messages in a file, up to the first incomplete one."""
    while len(head := file.read(_HEADER.size)) == _HEADER.size:
        size, extra = _HEADER.unpack(head)
        body, contents = file.read(size), file.read(extra)
        if (len(body), len(contents)) != (size, extra):
            return
        yield json.loads(body), contents


def open_messages() -> BinaryIO:
    """In a child: die with the parent, and return the pipe for messages, named by the last argument."""
    linux.die_with_parent()
    return message_pipe(int(sys.argv.pop()))


def message_pipe(fd: int) -> BinaryIO:
    """In a child: return the pipe for messages. Forks and programs of the child cannot write to it."""
    os.set_inheritable(fd, False)
    pipe = os.fdopen(fd, "wb")
    os.register_at_fork(after_in_child=lambda: _disconnect(pipe))
    return pipe


def _disconnect(pipe: BinaryIO) -> None:
    if not pipe.closed:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), pipe.fileno(), inheritable=False)


class RunningProcess(Protocol):
    """What ``Child`` needs of a process, as ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class MessageReader:
    """The messages and the output of a process, with a time limit.

    ``start`` starts it, given the pipe for its messages and the file for its output. Leaving the
    ``with`` block kills the process if it still runs.
    """

    def __init__(
        self, start: Callable[[int, int], RunningProcess], *, limit_s: float | None, own_group: bool = False
    ) -> None:
        self._limit_s, self._own_group = limit_s, own_group
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed on exit
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb", buffering=0)
        try:
            self._process = start(write, self._output.fileno())
        except BaseException:
            self._pipe.close()
            self._output.close()
            raise
        finally:
            os.close(write)
        self._pidfd = os.pidfd_open(self._process.pid)
        self.timed_out = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._kill()
        for file in (self._pipe, self._output):
            file.close()
        os.close(self._pidfd)

    def messages(self) -> Iterator[tuple[Any, bytes]]:
        """Yield its messages until it ends, or is silent for too long."""
        return read_messages(self)

    def read(self, size: int) -> bytes:
        """Return the next bytes of its messages; fewer if it has ended or is silent for too long."""
        parts: list[bytes] = []
        while size and not self.timed_out and self._has_more():
            part = self._pipe.read(min(size, _MAX_READ_BYTES))
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _has_more(self) -> bool:
        pipe = self._pipe.fileno()
        ready, _, _ = select.select([pipe, self._pidfd], [], [], self._limit_s)
        self.timed_out = not ready
        # after its end only what it has written counts: its own children may keep the pipe open
        return pipe in ready or bool(ready and select.select([pipe], [], [], 0)[0])

    def wait(self) -> int:
        """Wait for its end, killing it if it takes too long; return its exit code."""
        try:
            return self._process.wait(0 if self.timed_out else self._limit_s)
        except subprocess.TimeoutExpired:
            self.timed_out = True
            return self._kill()

    @property
    def ending(self) -> str:
        """How it ended."""
        code = self.wait()
        return f"took more than {self._limit_s:g} s" if self.timed_out else linux.describe_returncode(code)

    def output(self) -> str:
        """Return what it has printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _kill(self) -> int:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another process may have waited for it just now
                (os.killpg if self._own_group else os.kill)(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class Child(MessageReader):
    """A program that sends messages; the last argument of its command is the pipe's descriptor."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        question: str = "",
        limit_s: float | None = None,
        stdout: int | None = None,
        own_session: bool = False,
    ) -> None:
        """Start a program with a question on its stdin.

        It may be silent for ``limit_s``. Its output is kept in a file; given a ``stdout``, it has
        our stderr. In its own session, a Ctrl-C does not reach it, and all processes of the
        session are killed with it.
        """

        def start(pipe: int, output: int) -> subprocess.Popen[bytes]:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(question.encode())
                stdin.seek(0)
                out, err = (output, output) if stdout is None else (stdout, None)
                return subprocess.Popen(
                    [*command, str(pipe)], stdin=stdin, stdout=out, stderr=err, pass_fds=[pipe], env=environment,
                    start_new_session=own_session,
                )  # fmt: skip

        super().__init__(start, limit_s=limit_s, own_group=own_session)
