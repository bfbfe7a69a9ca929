"""Verdict on one case."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

FAULT = "a defect of PyTorch"
"""Reason, in a note, why something was not judged."""
REFERENCE_FAULT = "a fault of the reference's"
"""The same for a user's own operator."""


class Outcome(enum.StrEnum):
    """The kinds of verdict."""

    PASSED = "passed"
    WRONG = "wrong"
    CONTRACT = "contract"
    CHEATED = "cheated"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


REJECTED = frozenset({Outcome.WRONG, Outcome.CONTRACT, Outcome.CHEATED, Outcome.CRASHED, Outcome.TIMED_OUT})
"""Verdicts that reject a kernel: it did something wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its reason and its figures."""

    outcome: Outcome
    reason: str = ""
    notes: tuple[str, ...] = ()
    """Differences from ATen that break no rule."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED

    def row(self) -> dict[str, Any]:
        """Return the fields of a line of results.jsonl."""
        row: dict[str, Any] = {"verdict": self.outcome.value, "reason": _printable(self.reason)}
        if self.notes:
            row["notes"] = [_printable(note) for note in self.notes]
        return {**row, **self.figures}


def _printable(text: str) -> str:
    """Return a text of bounded length that any file can hold; parts may come from a kernel."""
    return text[:4000].encode("utf-8", "replace").decode()


class NotRightError(Exception):
    """Raised inside the judge where a check fails; carries the finding."""

    def __init__(self, outcome: Outcome, reason: str, **figures: Any) -> None:
        super().__init__(reason)
        self.finding = Finding(outcome, reason, (), figures)
