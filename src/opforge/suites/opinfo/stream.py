"""Messages from the process that runs OpInfo's entries to the process that writes cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

from opforge.procs.child import send
from opforge.traces.stream import split_contents


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """One call, ready to be written."""

    op: str
    phase: str
    raises: bool
    text: str
    """Text form with placeholders for blob offsets; empty for a new source of a known signature."""
    signature: str
    tree: str
    storages: list[bytes]
    """Contents of its tensors."""

    def send(self, pipe: BinaryIO) -> None:
        """Send the call as one message; the storages follow its JSON as bytes."""
        row = {name: getattr(self, name) for name in _SENT_FIELDS}
        send(pipe, {**row, "sizes": [len(s) for s in self.storages]}, b"".join(self.storages))

    @classmethod
    def from_wire(cls, row: Mapping[str, Any], contents: bytes) -> RecordedCase:
        return cls(**{name: row[name] for name in _SENT_FIELDS}, storages=split_contents(contents, row["sizes"]))


_SENT_FIELDS = [field.name for field in fields(RecordedCase) if field.name != "storages"]
