"""Merge the messages of recording processes into one trace.

Each distinct call appears once, with every model and phase that made it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opforge.cases.case_files import BlobWriter
from opforge.traces.stream import OFFSET_PLACEHOLDER, NewCall, split_contents
from opforge.traces.trace_file import CallCount, Trace, TracedCall


class StoredContents:
    """Places contents in the blob of a trace; equal ones once."""

    def __init__(self) -> None:
        self._offsets: dict[bytes, int] = {}
        self._size = 0

    def place(self, args: str, parts: Sequence[bytes]) -> PlacedContents:
        """Return a call's arguments with the offsets of its contents, and the bytes that these add to the blob."""
        stored, first_offset = b"", -1
        for index, part in enumerate(parts):
            offset, padded = self._place_part(part)
            if padded and first_offset < 0:
                first_offset = offset
            stored += padded
            args = args.replace(f"at={OFFSET_PLACEHOLDER + index}", f"at={offset}")
        digest = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest() if any(parts) else ""
        return PlacedContents(args, digest, first_offset, stored)

    def _place_part(self, part: bytes) -> tuple[int, bytes]:
        """Return the offset of some bytes, and what to append: nothing if they are stored."""
        digest = hashlib.blake2b(part, digest_size=16).digest()
        if digest in self._offsets:
            return self._offsets[digest], b""
        offset = self._offsets[digest] = self._size
        padded = part + b"\0" * (-len(part) % BlobWriter.ALIGN)
        self._size += len(padded)
        return offset, padded


@dataclass(frozen=True, slots=True)
class PlacedContents:
    """The fields of a call that depend on its stored contents."""

    args: str
    digest: str
    stored_at: int
    stored: bytes


class Collector:
    """Processes the messages of one recording process after another."""

    def __init__(self) -> None:
        self._calls: list[TracedCall] = []
        self._known: dict[str, int] = {}
        """Index of the call with each signature."""
        self._counts: list[Counter[tuple[str, str]]] = []
        self._numbers: dict[int, int] = {}
        """Index of a call, by the number that the current process gave it."""
        self._contents = StoredContents()
        self.losses: Counter[str] = Counter()
        self.models: list[str] = []
        self.started_op = ""
        """Operator of the last new call that was started; empty once counts have arrived."""

    def start_model(self, model: str) -> None:
        """Continue with another process, which runs another model."""
        self.models.append(model)
        self._numbers.clear()
        self.started_op = ""

    def add_message(self, message: Mapping[str, Any], contents: bytes) -> None:
        """Process one message of the current process."""
        if "at" in message:
            self.started_op = message["at"]
        elif "new" in message:
            call = NewCall.from_wire(message)
            self._numbers[call.number] = self._add_call(call, contents)
        elif "counts" in message:
            self.started_op = ""
            for number, phase, count in message["counts"]:
                self._counts[self._numbers[number]][self.models[-1], phase] += count
            self.losses.update(message["losses"])

    def merged_trace(self, metadata: Mapping[str, Any]) -> Trace:
        """Return the merged trace."""
        calls = [self._counted(call, counts) for call, counts in zip(self._calls, self._counts, strict=True) if counts]
        return Trace(calls, {**metadata, "models": self.models}, dict(self.losses.most_common()))

    def _counted(self, call: TracedCall, counts: Counter[tuple[str, str]]) -> TracedCall:
        seen = tuple(CallCount(model, phase, count) for (model, phase), count in counts.most_common())
        return replace(call, count=counts.total(), seen=seen, source=f"{seen[0].model} {seen[0].phase}")

    def _add_call(self, new: NewCall, contents: bytes) -> int:
        """Return the index of a call; a call that another model made before keeps its contents."""
        if (known := self._known.get(new.signature)) is not None:
            return known
        placed = self._contents.place(new.args, split_contents(contents, new.sizes))
        call = TracedCall(
            new.op,
            placed.args,
            input_bytes=new.input_bytes,
            result_bytes=new.result_bytes,
            flops=new.flops,
            digest=placed.digest,
            stored_at=placed.stored_at,
            stored=placed.stored,
        )
        self._known[new.signature] = len(self._calls)
        self._calls.append(call)
        self._counts.append(Counter())
        return len(self._calls) - 1
