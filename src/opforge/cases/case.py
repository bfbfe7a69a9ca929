"""A case: one call of one operator, and its expected outcome."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Any


class Expect(enum.StrEnum):
    """Whether ATen returns or raises."""

    RETURNS = "returns"
    RAISES = "raises"


class Phase(enum.StrEnum):
    """The purpose of the case."""

    CORRECTNESS = "correctness"
    PERFORMANCE = "performance"


@dataclass(frozen=True, slots=True)
class Case:
    """One call as data: the operator's full name and the text form of its arguments."""

    op: str
    args: str
    expect: Expect = Expect.RETURNS
    phase: Phase = Phase.CORRECTNESS
    source: str = ""
    """Where it was seen, for example ``nn.functional.relu backward``."""
    id: str = ""
    """Digest of operator, arguments and stored contents: the same in every run."""
    tree: str = ""
    """The arguments as a JSON tree, if a suite has stored it to avoid parsing the text again."""
    blob: str = ""
    """The suite's blob that holds its stored tensors."""
    lost: str = ""
    """Why it has no inputs and cannot run.

    The case stays in its suite, and every kernel for it gets this as its verdict.
    """

    @classmethod
    def make(cls, op: str, args: str, *, contents: str = "", **fields: Any) -> Case:
        """Return a case with its id; ``contents`` is a digest of the stored tensors, if any."""
        expect, phase = fields.get("expect", Expect.RETURNS), fields.get("phase", Phase.CORRECTNESS)
        return cls(op, args, id=case_id(op, args, contents, expect, phase), **fields)


def case_id(op: str, args: str, contents: str, expect: Expect, phase: Phase) -> str:
    """Return the id of a case."""
    text = f"{op}|{args}|{contents}|{expect}|{phase}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
