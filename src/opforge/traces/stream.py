"""Messages from a process that runs user code to the process that keeps the recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

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
    exit_code: int = 1
    """Exit code of the program, as Python would end with."""

    def wire(self) -> dict[str, str | bool | int]:
        return {name: value for name, value in asdict(self).items() if value or name == "error"}

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> TargetError:
        return cls(row["error"], row.get("ours", False), row.get("traceback", ""), row.get("exit_code", 1))


def split_contents(contents: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Return the parts of a message's contents."""
    ends = list(accumulate(sizes, initial=0))
    return [contents[start:end] for start, end in pairwise(ends)]
