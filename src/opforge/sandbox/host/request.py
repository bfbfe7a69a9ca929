"""Requests of a judge to a worker. The worker reads them as plain dicts: a new process imports little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


class _WireMessage:
    """A dataclass that travels as a JSON object. Fields that are None are left out."""

    __slots__: tuple[str, ...] = ()

    def wire(self) -> dict[str, Any]:
        return {name: _plain(value) for name in self.__slots__ if (value := getattr(self, name)) is not None}


class WorkerRequest(_WireMessage):
    """A message with the name of the step that it asks for."""

    __slots__ = ()
    do: ClassVar[str]

    def wire(self) -> dict[str, Any]:
        return {"do": self.do, **super().wire()}


def _plain(value: Any) -> Any:
    if isinstance(value, _WireMessage):
        return value.wire()
    if isinstance(value, list) and value and isinstance(value[0], _WireMessage):
        return [message.wire() for message in value]
    return value


@dataclass(frozen=True, slots=True)
class CaseRequest(_WireMessage):
    """One call of a kernel."""

    args: Any
    kwargs: dict[str, Any]
    owns_storage: bool
    """Whether the call gets inputs in memory of its own, and returns them."""
    seed: int | None = None
    situation: str | None = None
    elements: int | None = None
    """Elements of the largest input; the worker learns from it how fast the kernel is."""
    large_elements: int | None = None
    """The same for a large variant, which a slow kernel is not called on."""
    prefill_offsets: tuple[int, ...] | None = None
    """Where other contents lie: the kernel is called on them first, in the same tensors."""
    count_calls: bool | None = None
    """Whether to count the ATen operators that the kernel calls."""
    in_python: bool | None = None
    """Whether to call the kernel's function also where its operator has a native slot."""
    watch_rng: bool | None = None
    """Whether to report that the call drew random numbers."""
    wait_s: float | None = None
    """Seconds to wait before the result is read."""


@dataclass(frozen=True, slots=True)
class LoadRequest(WorkerRequest):
    """Load a kernel."""

    do = "load"
    kernel: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallRequest(WorkerRequest):
    """Call the kernel on several cases."""

    do = "call"
    op: str
    cases: list[CaseRequest]
    random: bool
    trusted: bool | None = None
    """Whether the worker runs no kernel, so that tampering is not looked for."""
    together: bool | None = None
    """Whether the worker may wait for the GPU once for many calls, and so not know which of them failed."""


@dataclass(frozen=True, slots=True)
class GradientRequest(WorkerRequest):
    """Compute gradients through the operator, with the kernel installed."""

    do = "gradient"
    op: str
    case: CaseRequest


@dataclass(frozen=True, slots=True)
class TimedCase(_WireMessage):
    """The case whose calls are timed."""

    op: str
    case: CaseRequest
    device: str


@dataclass(frozen=True, slots=True)
class AllocateRequest(WorkerRequest):
    """Allocate timed calls on a GPU."""

    do = "allocate"
    calls: int
    sets: int
    """Number of sets of inputs, which the calls use in turn."""
    graph: bool
    """Whether to capture the calls as a CUDA graph."""
    flush_bytes: int
    """Bytes to read before each pass, so that the cache holds neither inputs nor results."""
    timed: TimedCase | None = None
    """None to allocate the calls of the same case again."""


@dataclass(frozen=True, slots=True)
class HostAllocateRequest(WorkerRequest):
    """Allocate timed calls on a CPU."""

    do = "allocate"
    sets: int
    """Number of calls, each with its own inputs."""
    parts: int
    """Number of tensors and numbers in a result."""
    timed: TimedCase | None = None
    """None to allocate the calls of the same case again."""


@dataclass(frozen=True, slots=True)
class RunRequest(WorkerRequest):
    """Run a block of timed calls on a GPU."""

    do = "run"
    quantity: str
    """What is timed: ``device``, ``call`` or ``sync``."""
    calls: int
    ahead_ns: float
    """How long the device is kept busy while the host queues the calls."""


@dataclass(frozen=True, slots=True)
class HostRunRequest(WorkerRequest):
    """Run a block of timed calls on a CPU."""

    do = "run"
    dry: bool
    """Whether to do everything except the calls."""


@dataclass(frozen=True, slots=True)
class ResultRequest(WorkerRequest):
    """Return the result of one of the calls timed last."""

    do = "result"
    call: int
    with_inputs: bool
    check_integrity: bool
    thorough: bool
    """Whether that check includes everything registered under ``aten``."""
