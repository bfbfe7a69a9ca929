"""What goes from the process that runs OpInfo's entries to the one that writes cases."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<II")
"""Before each message: the length of its JSON and of the bytes after it."""
PLACE = 10**15
"""Stands for a place in the blob until the writer gives one: ``PLACE + n`` is the n-th storage of a call."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call, ready to be written."""

    op: str
    phase: str
    raises: bool
    text: str
    """Text form with placeholders for the places of stored tensors; empty when a known signature was met again."""
    signature: str
    tree: str
    storages: list[bytes]


def send_call(pipe: BinaryIO, recorded: Recorded) -> None:
    """Send one call with the contents of its tensors."""
    row = {**asdict(replace(recorded, storages=[])), "sizes": [len(s) for s in recorded.storages]}
    send(pipe, row, b"".join(recorded.storages))


def send(pipe: BinaryIO, message: dict[str, Any], contents: bytes = b"") -> None:
    """Send a message; it may wait in the pipe's buffer until that is flushed."""
    body = json.dumps(message).encode()
    pipe.write(LENGTHS.pack(len(body), len(contents)) + body + contents)
