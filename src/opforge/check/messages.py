"""Messages between the processes of a check, one line of JSON each.

A fork that searches calls or runs a check tells the child. The child tells the main process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from opforge.check.report import Finding


@dataclass(frozen=True, slots=True)
class Message:
    """The base of all messages."""

    def wire(self) -> str:
        return json.dumps([type(self).__name__, asdict(self)])

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


# ── from a fork to the child ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Calling(Message):
    """The operator is called next."""

    call: str
    number: int = 0
    """Number of the plan in a search."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One choice of arguments for a call: indices into the tables of ``generated_calls``."""

    shapes: int = 0
    dtypes: int = 0
    numbers: int = 0
    given: bool = False
    """Whether optional arguments are passed."""


@dataclass(frozen=True, slots=True)
class AcceptedCall(Message):
    """A generated call that the operator accepts."""

    call: str
    plan: CallPlan

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(fields["call"], CallPlan(**fields["plan"]))


@dataclass(frozen=True, slots=True)
class DeclaredCalls(Message):
    """The calls that the user or the package declares for the operator."""

    calls: list[str]
    source: str


@dataclass(frozen=True, slots=True)
class NoCallAccepted(Message):
    """The operator accepts no generated call."""

    tried: int
    errors: list[str]
    """The commonest errors."""


@dataclass(frozen=True, slots=True)
class EveryCallRefused(Message):
    """The operator cannot be called: it returns an input, or it has no kernel for the device."""

    returns_input: bool


@dataclass(frozen=True, slots=True)
class CheckFound(Message):
    """A finding of a check."""

    finding: Finding

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(Finding.from_wire(fields["finding"]))


@dataclass(frozen=True, slots=True)
class CheckBroke(Message):
    """The check itself raises, not the operator."""

    error: str


@dataclass(frozen=True, slots=True)
class CompilerModules(Message):
    """The modules that torch's compiler imports."""

    names: list[str]


@dataclass(frozen=True, slots=True)
class ActionRaised(Message):
    """The fork's action ended with an error."""

    error: str


@dataclass(frozen=True, slots=True)
class ActionFinished(Message):
    """The fork's action ended."""


# ── from the child to the main process ─────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ChildFailed(Message):
    """The target cannot be checked."""

    error: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class TargetLoaded(Message):
    """The target is imported."""

    schemas: dict[str, str]
    """Schemas of its operators, by name."""
    notes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class OperatorInputs(Message):
    """The calls of an operator, or why it has none."""

    operator: str
    calls: list[str]
    origin: str
    unsupported: str


@dataclass(frozen=True, slots=True)
class OperatorFound(Message):
    """A finding about an operator."""

    operator: str
    finding: Finding

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(fields["operator"], Finding.from_wire(fields["finding"]))


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """How much of the work is done."""

    label: str
    done: int
    total: int


_MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Calling, AcceptedCall, DeclaredCalls, NoCallAccepted, EveryCallRefused, CheckFound, CheckBroke, CompilerModules,
        ActionRaised, ActionFinished, ChildFailed, TargetLoaded, OperatorInputs, OperatorFound, Progress,
    )
}  # fmt: skip


def from_wire(line: str | bytes) -> Message:
    """Return the message of a line."""
    name, fields = json.loads(line)
    return _MESSAGES[name].from_fields(fields)
