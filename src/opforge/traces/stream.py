"""Messages from a process that runs user code to the process that keeps the recording."""

from __future__ import annotations

import io
import json
import os
import select
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, cast

from opforge.procs.linux import describe_returncode

HEADER = struct.Struct("<II")
"""Header of each message: the length of its JSON and of the bytes after it."""
OFFSET_PLACEHOLDER = 10**15
"""Placeholder for a blob offset not yet assigned: ``OFFSET_PLACEHOLDER + n`` is the n-th storage of a call."""


@dataclass(frozen=True, slots=True)
class NewCall:
    """Message about the first call with a signature; the bytes after it are its stored contents."""

    number: int
    op: str
    args: str
    signature: str
    input_bytes: int
    flops: int
    sizes: list[int]
    """Bytes of each stored storage."""
    result_bytes: int

    def wire(self) -> dict[str, Any]:
        row = asdict(self)
        return {"new": row.pop("number"), **row}

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> NewCall:
        return cls(row["new"], **{name: value for name, value in row.items() if name != "new"})


@dataclass(frozen=True, slots=True)
class TargetError:
    """Message about the error that ended a program."""

    error: str
    ours: bool = False
    """Whether the target cannot be run at all; the message is then for the user."""
    traceback: str = ""

    def wire(self) -> dict[str, str | bool]:
        return {name: value for name, value in asdict(self).items() if value or name == "error"}

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> TargetError:
        return cls(row["error"], row.get("ours", False), row.get("traceback", ""))


def send(pipe: BinaryIO, message: Mapping[str, Any], contents: bytes = b"") -> None:
    """Send a message; it may stay in the pipe's buffer until a flush."""
    body = json.dumps(message).encode()
    pipe.write(HEADER.pack(len(body), len(contents)) + body + contents)


def read_messages(file: BinaryIO) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    """Yield the messages in a file, up to the first incomplete one."""
    while len(head := file.read(HEADER.size)) == HEADER.size:
        size, extra = HEADER.unpack(head)
        body, contents = file.read(size), file.read(extra)
        if (len(body), len(contents)) != (size, extra):
            return
        yield json.loads(body), contents


def split_contents(contents: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Return the parts of a message's contents."""
    ends = list(accumulate(sizes, initial=0))
    return [contents[start:end] for start, end in pairwise(ends)]


class RecordingProcess:
    """A recording process that user code may kill; its last argument is the pipe's descriptor."""

    def __init__(self, command: Sequence[str], max_silence_s: float | None, **popen_options: Any) -> None:
        read, write = os.pipe()
        self._limit_s = max_silence_s
        self._process = subprocess.Popen(
            [*command, str(write)], pass_fds=[write], stdin=subprocess.DEVNULL, **popen_options
        )
        os.close(write)
        self._pipe = cast("io.BufferedReader", os.fdopen(read, "rb", buffering=1 << 20))
        self.timed_out = False

    def next_message(self) -> tuple[Mapping[str, Any], bytes] | None:
        """Return the next message, or None if the child has ended or is silent for too long."""
        head = self._read(HEADER.size)
        if len(head) < HEADER.size:
            return None
        size, extra = HEADER.unpack(head)
        body, contents = self._read(size), self._read(extra)
        return (json.loads(body), contents) if (len(body), len(contents)) == (size, extra) else None

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            if not select.select([self._pipe], [], [], self._limit_s)[0]:
                self.timed_out = True
                break
            part = self._pipe.raw.read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def wait(self) -> tuple[int, str]:
        """Wait for the process, killing it if it hangs; return its exit code and how it ended."""
        if self.timed_out:
            self._process.kill()
        self._pipe.close()
        code = self._process.wait()
        return code, f"took more than {self._limit_s:g} s" if self.timed_out else describe_returncode(code)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self.wait()
