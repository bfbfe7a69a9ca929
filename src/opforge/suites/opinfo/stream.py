"""Messages from the process that runs OpInfo's entries to the process that writes cases."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import BinaryIO

from opforge.traces.stream import send


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call, ready to be written."""

    op: str
    phase: str
    raises: bool
    text: str
    """Text form with placeholders for blob offsets; empty for a new source of a known signature."""
    signature: str
    tree: str
    storages: list[bytes]


_SENT_FIELDS = [field.name for field in fields(RecordedCall) if field.name != "storages"]


def send_call(pipe: BinaryIO, recorded: RecordedCall) -> None:
    """Send one call with the contents of its tensors."""
    row = {name: getattr(recorded, name) for name in _SENT_FIELDS}
    send(pipe, {**row, "sizes": [len(s) for s in recorded.storages]}, b"".join(recorded.storages))
