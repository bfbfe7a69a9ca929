"""Verdict on one case."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

PYTORCH_DEFECT = "a defect of PyTorch"
"""Reason, in a note, why something was not judged."""
REFERENCE_DEFECT = "a fault of the reference's"
"""The same for a user's own operator."""


class VerdictKind(enum.StrEnum):
    """The kinds of verdict."""

    PASSED = "passed"
    WRONG = "wrong"
    CONTRACT = "contract"
    CHEATED = "cheated"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


REJECTING_KINDS = frozenset(
    {VerdictKind.WRONG, VerdictKind.CONTRACT, VerdictKind.CHEATED, VerdictKind.CRASHED, VerdictKind.TIMED_OUT}
)
"""Verdicts that reject a kernel: it did something wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict with its reason and its figures."""

    kind: VerdictKind
    reason: str = ""
    notes: tuple[str, ...] = ()
    """Differences from ATen that break no rule."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.kind is VerdictKind.PASSED

    def wire(self) -> dict[str, Any]:
        """Return the fields of a line of results.jsonl."""
        row: dict[str, Any] = {"verdict": self.kind.value, "reason": _printable(self.reason)}
        if self.notes:
            row["notes"] = [_printable(note) for note in self.notes]
        return {**row, **self.figures}


def _printable(text: str) -> str:
    """Return a text of bounded length that any file can hold; parts may come from a kernel."""
    return text[:4000].encode("utf-8", "replace").decode()


class RejectedError(Exception):
    """Raised inside the judge where a check fails; carries the finding."""

    def __init__(self, kind: VerdictKind, reason: str, **figures: Any) -> None:
        super().__init__(reason)
        self.verdict = Verdict(kind, reason, (), figures)
