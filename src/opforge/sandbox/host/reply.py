"""Replies of a worker, checked and parsed. A kernel shares the worker's process and may forge them.

A judge reads no reply that has not passed through here. Whether a claim is true is checked later.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opforge.cases.values import DTYPES, contiguous_strides
from opforge.runtime.trees import instances, map_instances

MALFORMED_REPLY = "the worker's reply is malformed"
REPLAYED, CPP, PYTHON = WAYS = ("replayed", "C++", "Python")
"""How a call ran behind a native slot: from a launch plan, as a C++ operator, or through Python."""
MAX_TESTS = 10_000
"""Tests that a user's file may have for a phase."""
MemoryLocation = tuple[str, int]
"""A hexadecimal handle and an offset; for host memory, no handle and an address."""
_DEFAULT_ESTIMATE_NS = 1e6
_MAX_COUNTED_OPERATORS = 100
_MAX_NAME_CHARS = 80
_MAX_ADDRESS = 1 << 63
_MAX_DIMS = 64
"""Dimensions that torch allows."""
_MAX_DEPTH = 100
"""Lists in a result may be nested this deep: they are walked by recursion."""


class MalformedReplyError(Exception):
    """A reply that opforge's own code in the worker cannot have written."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{MALFORMED_REPLY}: {detail}" if detail else MALFORMED_REPLY)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ReportedTensor:
    """A tensor of a result. Its elements lie in the arena, contiguous."""

    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    same: tuple[int, ...] = ()
    """Inputs that are the very same tensor."""
    aliases: tuple[int, ...] = ()
    """Inputs that share memory with it."""
    subclass: str = ""
    """Name of its class, if that is a subclass of Tensor."""

    @classmethod
    def from_wire(cls, fields: dict[str, Any], region: range) -> ReportedTensor:
        """Parse a tensor that must lie in a region of the arena."""
        row = fields["T"]
        if not isinstance(row, list) or len(row) != 7:
            raise MalformedReplyError("a tensor's row has another form")
        start, nbytes, dtype, shape, strides, _offset, device = row
        if not (isinstance(dtype, str) and dtype in DTYPES and isinstance(device, str)):
            raise MalformedReplyError("a tensor has no dtype or no device")
        sizes, steps = _integers(shape), _integers(strides)
        if len(sizes) != len(steps) or len(sizes) > _MAX_DIMS or not all(map(_is_offset, (*sizes, *map(abs, steps)))):
            raise MalformedReplyError("a tensor's shape and strides do not fit")
        if not (type(start) is int and type(nbytes) is int and region.start <= start <= start + nbytes <= region.stop):
            raise MalformedReplyError(f"a result is at {start}, outside its region")
        if math.prod(sizes) * DTYPES[dtype][1] != nbytes:
            raise MalformedReplyError(f"{nbytes} bytes for shape {shape} of {dtype}")
        same, aliases = _integers(fields.get("same", [])), _integers(fields.get("alias", []))
        return cls(start, nbytes, dtype, sizes, steps, device, same, aliases, _text(fields.get("class", "")))

    def row(self, offset: int) -> list[Any]:
        """Return the row of its elements in a copy of the arena from an offset on."""
        return [self.start - offset, self.nbytes, self.dtype, self.shape, contiguous_strides(self.shape), 0, None]


@dataclass(frozen=True, slots=True)
class ReportedDtype:
    """A dtype as a result; ``short`` should be a key of ``DTYPES``."""

    short: str


@dataclass(frozen=True, slots=True)
class ReportedObject:
    """Description of a result that cannot be returned."""

    kind: str


Returned = ReportedTensor | ReportedDtype | ReportedObject | complex | float | int | bool | str | None | list[Any]
"""A result: lists contain results again."""


def _returned(value: Any, region: range, depth: int = 0) -> Returned:
    match value:
        case list() if depth < _MAX_DEPTH:
            return [_returned(item, region, depth + 1) for item in value]
        case {"T": _}:
            return ReportedTensor.from_wire(value, region)
        case {"complex": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case {"dtype": str(short)}:
            return ReportedDtype(short)
        case {"junk": kind}:
            return ReportedObject(_text(kind))
        case None | bool() | int() | float() | str():
            return value
    raise MalformedReplyError("a result is neither a tensor nor a number")


@dataclass(frozen=True, slots=True)
class CallReply:
    """What a worker reports about one call of its kernel."""

    escape_attempts: str = ""
    """What the kernel tried in order to break out of its confinement."""
    exited: str | None = None
    """Argument of the SystemExit that the kernel raised."""
    raised: tuple[str, str] | None = None
    """Class and text of the exception that the kernel raised."""
    bypass: tuple[str, ...] = ()
    """Forbidden operators that the kernel called."""
    state_changes: tuple[str, ...] = ()
    reshaped: tuple[int, ...] = ()
    """Inputs whose shape or strides changed."""
    written_through: tuple[int, ...] = ()
    """Inputs whose write reached the memory that they are a lazy clone of."""
    late: bool = False
    """Whether another stream was still busy after the call."""
    shares_result: bool = False
    """Whether two results share memory."""
    unusable: str = ""
    """How results or inputs are less usable than after ATen."""
    changed_later: bool = False
    """Whether the result changed after the call returned."""
    inputs: tuple[ReportedTensor | None, ...] | None = None
    """Inputs after the call, where they were asked for; None for one that cannot be returned."""
    returned: Returned = None
    used_rng: bool = False
    calls: dict[str, int] | None = None
    """How often the kernel called each ATen operator, if counted."""
    ran: str = ""
    """How the call ran behind a native slot, one of ``WAYS``; empty if the kernel's function was called."""
    not_replayed: str = ""
    """Why it ran through Python."""
    mutant: str = ""
    """Effect of a mutant on the call."""
    malformed: str = ""
    """Why the reply is malformed, if it is; the first malformed field and those after it are unset."""

    @classmethod
    def from_wire(cls, reply: dict[str, Any], region: range) -> CallReply:
        """Parse a reply whose results lie in a region of the arena; record where it is malformed."""
        fields: dict[str, Any] = {}
        try:  # in the order in which a judge looks at them
            fields["escape_attempts"] = _text(reply.get("escape_attempts") or "")
            fields["exited"] = _text(reply["exited"]) if "exited" in reply else None
            fields["mutant"] = _text(reply.get("mutant", ""))
            fields["bypass"] = _texts(reply.get("bypass") or [])
            fields["raised"] = _exception(reply["raised"]) if "raised" in reply else None
            fields["state_changes"] = _texts(reply.get("state") or [])
            for name in ("reshaped", "written_through"):
                fields[name] = _integers(reply.get(name) or [])
            for name in ("late", "shares_result", "changed_later", "used_rng"):
                fields[name] = bool(reply.get(name))
            fields["unusable"] = _text(reply.get("unusable") or "")
            fields["ran"] = ran if (ran := reply.get("ran")) in WAYS else ""
            fields["not_replayed"] = _text(reply.get("not_replayed") or "")
            fields["calls"] = _counts(reply["calls"]) if "calls" in reply else None
            fields["inputs"] = _inputs(reply["inputs"], region) if "inputs" in reply else None
            fields["returned"] = _result(reply, region)
        except MalformedReplyError as error:
            fields["malformed"] = error.detail
        return cls(**fields)

    @property
    def tensors(self) -> list[ReportedTensor]:
        return list(instances([self.returned, self.inputs], ReportedTensor))

    def without_locations(self) -> CallReply:
        """Return the reply without the locations of its tensors; the rest is the same in every draw."""

        def at_start(tensor: ReportedTensor) -> ReportedTensor:
            return replace(tensor, start=0)

        inputs, returned = (map_instances(tree, ReportedTensor, at_start) for tree in (self.inputs, self.returned))
        return replace(self, inputs=inputs, returned=returned)


@dataclass(frozen=True, slots=True)
class CallsReply:
    """Reply to a request for several calls."""

    calls: list[CallReply]
    tampered: tuple[str, ...] = ()
    """What the kernel changed in its process."""

    @classmethod
    def from_wire(cls, reply: Any, count: int, region: range) -> CallsReply:
        """Parse the reply to ``count`` calls."""
        results = reply_fields(reply).get("results")
        if not isinstance(results, list) or len(results) != count or not all(isinstance(r, dict) for r in results):
            raise MalformedReplyError
        return cls([CallReply.from_wire(result, region) for result in results], _tampered(reply))


def failed_together(reply: Any) -> str:
    """Return the error of calls that were queued together, if the reply says that they failed and nothing else."""
    text = reply.get("failed_together") if isinstance(reply, dict) and len(reply) == 1 else None
    return _text(text) if isinstance(text, str) else ""


def results_end(replies: Iterable[CallReply], region: range) -> int:
    """Return where the results in the replies end, within their region of the arena."""
    return max((tensor.start + tensor.nbytes for reply in replies for tensor in reply.tensors), default=region.start)


@dataclass(frozen=True, slots=True)
class LoadReply:
    """Reply to the loading of a kernel; None where there is nothing to report."""

    escape_attempts: str | None = None
    error: str | None = None
    tampered: tuple[str, ...] = ()
    state_changes: tuple[str, ...] = ()

    @classmethod
    def from_wire(cls, reply: Any) -> LoadReply:
        fields = reply_fields(reply)
        attempts, error = (_text(fields[name]) if name in fields else None for name in ("escape_attempts", "error"))
        return cls(attempts, error, _tampered(fields), _texts(fields.get("state") or []))

    @property
    def is_refused(self) -> bool:
        return self != LoadReply()


@dataclass(frozen=True, slots=True)
class IntegrityReply:
    """Reply to a check of the worker's functions and registrations."""

    tampered: tuple[str, ...]

    @classmethod
    def from_wire(cls, reply: Any) -> IntegrityReply:
        return cls(_tampered(reply_fields(reply)))


@dataclass(frozen=True, slots=True)
class InputTestsReply:
    """Number of tests of a user's input file by phase, and why a phase has none."""

    counts: dict[str, int]
    errors: dict[str, str]

    @classmethod
    def from_wire(cls, reply: Any) -> InputTestsReply:
        """Parse a reply; one that reports a fault has neither counts nor errors."""
        counts, errors = reply_fields(reply).get("counts"), reply.get("errors")
        if not isinstance(counts, dict) or not isinstance(errors, dict):
            raise MalformedReplyError
        if not all(type(count) is int and 0 <= count <= MAX_TESTS for count in counts.values()):
            raise MalformedReplyError
        return cls(counts, {phase: _text(error) for phase, error in errors.items()})


def fault(reply: Any) -> str:
    """Return why a user's file gives no tests or no inputs, by its worker's reply; empty if it does."""
    fields = reply_fields(reply)
    return _text(fields.get("escape_attempts") or fields.get("error") or "")


def raised_text(reply: dict[str, Any]) -> str | None:
    """Return the text of an exception in a timing step; None if there was none."""
    if "raised" not in reply:
        return None
    raised = reply["raised"]
    return _text(raised[-1] if isinstance(raised, list) and raised else raised)


@dataclass(frozen=True, slots=True)
class HostAllocateReply:
    """Addresses of the inputs of each timed call on a CPU."""

    addresses: list[list[int]]

    @classmethod
    def from_wire(cls, reply: dict[str, Any], calls: int, inputs: int) -> HostAllocateReply:
        """Parse the addresses of ``calls`` calls with ``inputs`` inputs each."""
        rows = reply.get("inputs")
        if not isinstance(rows, list) or len(rows) != calls or not all(isinstance(row, list) for row in rows):
            raise MalformedReplyError
        if any(len(row) != inputs or not all(map(_is_offset, row)) for row in rows):
            raise MalformedReplyError
        return cls(rows)


@dataclass(frozen=True, slots=True)
class AllocateReply:
    """Locations of the inputs of each set on a GPU, and of the results of captured calls."""

    inputs: list[list[MemoryLocation | None]]
    results: list[Any]
    """By call; `locations` parses those of a chosen call."""
    capture_failure: str | None
    """Why the calls are timed by events instead of a CUDA graph."""

    @classmethod
    def from_wire(cls, reply: dict[str, Any], sets: int, inputs: int) -> AllocateReply:
        """Parse the locations of ``sets`` sets with ``inputs`` inputs each."""
        rows = reply.get("inputs")
        if not isinstance(rows, list) or len(rows) != sets:
            raise MalformedReplyError
        failure = reply.get("failure") if reply.get("method") == "events" else None
        failure = None if failure is None else _text(failure)
        return cls([_locations(row, inputs) for row in rows], _list(reply.get("results")), failure)


@dataclass(frozen=True, slots=True)
class EstimateReply:
    """A worker's estimates of its call times; they only size blocks."""

    device_ns: float
    call_ns: float

    @classmethod
    def from_wire(cls, reply: dict[str, Any]) -> EstimateReply:
        return cls(_estimate(reply.get("device_ns")), _estimate(reply.get("call_ns")))


@dataclass(frozen=True, slots=True)
class RunReply:
    """A worker's time of a block on a GPU, and the locations of its results."""

    ns: Any
    """Time of a call; `is_time` says whether it can be one."""
    results: list[Any]
    """By call; `locations` parses those of a chosen call."""

    @classmethod
    def from_wire(cls, reply: dict[str, Any]) -> RunReply:
        return cls(reply.get("ns"), _list(reply.get("results")))


@dataclass(frozen=True, slots=True)
class ResultReply:
    """Result of one timed call."""

    tampered: tuple[str, ...]
    result: CallReply

    @classmethod
    def from_wire(cls, reply: dict[str, Any], region: range) -> ResultReply:
        """Parse a reply; the result of a worker that reports tampering does not matter."""
        if tampered := _tampered(reply):
            return cls(tampered, CallReply())
        return cls((), CallReply.from_wire(reply_fields(reply.get("result")), region))


def is_time(ns: Any) -> bool:
    """Whether a call can take this many nanoseconds."""
    return isinstance(ns, int | float) and 0 < ns <= sys.float_info.max


def _estimate(ns: Any) -> float:
    return float(ns) if is_time(ns) else _DEFAULT_ESTIMATE_NS


def locations(results: Sequence[Any], call: int, parts: int) -> list[MemoryLocation | None]:
    """Return the locations of the parts of one call's result; None for a part that cannot be mapped."""
    return _locations(results[call] if call < len(results) else None, parts)


def _locations(row: Any, count: int) -> list[MemoryLocation | None]:
    if not isinstance(row, list) or len(row) != count:
        raise MalformedReplyError
    return [None if place is None else _location(place) for place in row]


def _location(place: Any) -> MemoryLocation:
    match place:
        case [str(handle), offset] if _is_offset(offset):
            return handle, offset
    raise MalformedReplyError


def reply_fields(reply: Any) -> dict[str, Any]:
    """Return the fields of a reply, which must be a JSON object."""
    if not isinstance(reply, dict):
        raise MalformedReplyError
    return reply


def _list(value: Any) -> list[Any]:
    """Return a list, or an empty one if a worker sent something else."""
    return value if isinstance(value, list) else []


def _is_offset(value: Any) -> bool:
    """Whether a value is an address or a size, which fit 63 bits."""
    return type(value) is int and 0 <= value < _MAX_ADDRESS


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise MalformedReplyError("a list of integers is something else")
    return tuple(value)


def _text(value: Any) -> str:
    """Return a text; lists and objects are refused, since describing them recurses."""
    if isinstance(value, list | dict):
        raise MalformedReplyError("a text is something else")
    return str(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise MalformedReplyError("a list of texts is something else")
    return tuple(map(_text, value))


def _tampered(reply: dict[str, Any]) -> tuple[str, ...]:
    changes = reply.get("tampered") or []
    return tuple(map(_text, changes if isinstance(changes, list) else [changes]))


def _exception(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedReplyError("an exception is not a class and a text")
    return _text(value[0]), _text(value[1])


def _counts(value: Any) -> dict[str, int]:
    """Return the counts of a kernel's own calls, without what is not a count."""
    counts = list(value.items())[:_MAX_COUNTED_OPERATORS] if isinstance(value, dict) else []
    return {str(name)[:_MAX_NAME_CHARS]: count for name, count in counts if isinstance(count, int)}


def _result(reply: dict[str, Any], region: range) -> Returned:
    if "returned" not in reply and not {"raised", "exited"} & reply.keys():
        raise MalformedReplyError("it has no result")
    return _returned(reply.get("returned"), region)


def _inputs(value: Any, region: range) -> tuple[ReportedTensor | None, ...]:
    if not isinstance(value, list):
        raise MalformedReplyError("the inputs are no list")
    return tuple(None if row is None else ReportedTensor.from_wire({"T": row}, region) for row in value)
