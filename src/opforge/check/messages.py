"""Messages between the processes of a check.

A fork that searches calls or runs a check sends to the child, and the child to the main process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

from opforge.check.findings import Finding
from opforge.procs.forks import ForkJob, ForkResult


@dataclass(frozen=True, slots=True)
class Message:
    """The base of all messages."""

    def wire(self) -> list[Any]:
        return [type(self).__name__, asdict(self)]

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
    plausible: bool = True
    """Whether the fake accepts the call too, and the result is stable."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(fields["call"], CallPlan(**fields["plan"]), fields["plausible"])


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
class BackwardCalled(Message):
    """The operators that the backward of the checked operator called."""

    operators: list[str]


@dataclass(frozen=True, slots=True)
class Raised(Message):
    """The action of a fork raised, with the line of the user's code."""

    error: str


@dataclass(frozen=True, slots=True)
class CheckBroke(Message):
    """The check itself raises, not the operator."""

    error: str


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
class OperatorBackward(Message):
    """The operators that an operator's backward calls."""

    operator: str
    calls: list[str]


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """How much of the work is done."""

    label: str
    done: int
    total: int


_MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Calling, AcceptedCall, DeclaredCalls, NoCallAccepted, EveryCallRefused, CheckFound, BackwardCalled,
        Raised, CheckBroke, ChildFailed, TargetLoaded, OperatorInputs, OperatorFound, OperatorBackward, Progress,
    )
}  # fmt: skip


def from_wire(row: list[Any]) -> Message:
    """Return the message of a row."""
    name, fields = row
    return _MESSAGES[name].from_fields(fields)


Send = Callable[[Message], None]
"""Sends a message from a fork to its parent, unbuffered."""
_Kind = TypeVar("_Kind", bound=Message)


def fork_job(key: Any, action: Callable[[Send], None], limit_s: float) -> ForkJob:
    """Return a job that runs in a fork and sends messages."""
    return ForkJob(lambda send: action(lambda message: send(message.wire())), limit_s, key)


def sent(result: ForkResult, kind: type[_Kind]) -> list[_Kind]:
    """Return the messages of one kind that a fork has sent."""
    return [message for message in map(from_wire, result.sent) if isinstance(message, kind)]
