"""Launch plans: what a kernel in Python does for calls of one geometry, as data that C++ can replay."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

_SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip
"""Numbers of c10::ScalarType, which stay the same between versions of torch."""
_INPUT, _WRITTEN_INPUT, _ALLOCATION, _BITS = range(4)
_UNDEFINED, _GIVEN, _WHOLE, _VIEW = range(4)
_LAUNCH, _FILL, _COPY, _FILL_VALUE = range(4)
_NUMBER_KINDS = ("int", "float", "bool")


class NoPlanError(Exception):
    """A kernel has no launch plan for a call; the message says why."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in a tensor: one of the call's, or one that the kernel allocates."""

    allocated: bool
    index: int
    offset: int
    """Bytes from the tensor's start."""
    written: bool = False
    """Whether the kernel may write a tensor of the call."""

    def encode(self) -> tuple[int, int, int]:
        source = _ALLOCATION if self.allocated else _WRITTEN_INPUT if self.written else _INPUT
        return source, self.index, self.offset


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A launch of a compiled kernel."""

    function: int
    """Handle of the driver's function."""
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[Pointer | int, ...]
    """Pointers, and numbers as 64 bits."""

    def encode(self) -> Iterator[int]:
        yield from (_LAUNCH, self.function, *self.grid, self.threads, self.shared, 0, 0, len(self.arguments))
        for argument in self.arguments:
            yield from (_BITS, 0, signed(argument)) if isinstance(argument, int) else argument.encode()


@dataclass(frozen=True, slots=True)
class Fill:
    """A fill of memory with a byte."""

    target: Pointer
    bytes: int
    byte: int = 0

    def encode(self) -> Iterator[int]:
        yield from (_FILL, 0, 1, 1, 1, 1, 0, self.bytes, self.byte, 1, *self.target.encode())


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in memory of the call, or in memory that the kernel allocates."""

    place: Pointer
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def encode(self) -> Iterator[int]:
        yield from (*self.place.encode(), scalar_type(self.dtype), len(self.sizes), *self.sizes, *self.strides)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy by ATen, which may convert and broadcast."""

    target: View
    source: View

    def encode(self) -> Iterator[int]:
        yield from (_COPY, *self.target.encode(), *self.source.encode())


@dataclass(frozen=True, slots=True)
class FillValue:
    """A fill by ATen with a number."""

    target: View
    kind: str
    """Type of the number: ``int``, ``float`` or ``bool``."""
    bits: int
    """The number as 64 bits: a NaN does not equal itself."""

    @classmethod
    def of(cls, target: View, value: object) -> FillValue:
        """Return a fill with a Python number; raise NoPlanError for anything else."""
        kind = type(value).__name__
        if kind not in _NUMBER_KINDS or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
            raise NoPlanError(f"it fills a tensor with {value!r}, and plans have numbers of 64 bits for that")
        bits = struct.unpack("<q", struct.pack("<d" if kind == "float" else "<q", value))[0]
        return cls(target, kind, bits)

    def encode(self) -> Iterator[int]:
        yield from (_FILL_VALUE, *self.target.encode(), _NUMBER_KINDS.index(self.kind), self.bits)


Step = KernelLaunch | Fill | Copy | FillValue


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that the kernel allocates."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def encode(self) -> Iterator[int]:
        yield from (scalar_type(self.dtype), len(self.sizes), *self.sizes, *self.strides)


@dataclass(frozen=True, slots=True)
class Result:
    """A result: a tensor of the call, an allocated tensor, or a view of one."""

    allocated: bool
    index: int
    dtype: torch.dtype
    offset: int
    """Elements from the start of allocated memory; 0 for a tensor of the call."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a kernel does for calls of one geometry."""

    device: torch.device
    inputs: int
    """Number of tensors of a call, with those that stand for numbers."""
    allocations: tuple[Allocation, ...]
    steps: tuple[Step, ...]
    results: tuple[Result | None, ...]

    def encode(self) -> list[int]:
        """Return the words that C++ reads; see the constructor of Plan in plan.h."""
        cuda = self.device.type == "cuda"
        words = [int(cuda), (self.device.index or 0) if cuda else -1, self.inputs]
        words.append(len(self.allocations))
        for allocation in self.allocations:
            words += allocation.encode()
        words.append(len(self.steps))
        for step in self.steps:
            words += step.encode()
        words.append(len(self.results))
        for result in self.results:
            words += self._encode_result(result)
        return words

    def _encode_result(self, result: Result | None) -> list[int]:
        if result is None:
            return [_UNDEFINED, 0, 0, 0, 0]
        if not result.allocated:
            return [_GIVEN, result.index, 0, 0, 0]
        made = self.allocations[result.index]
        is_whole = not result.offset and made == Allocation(result.dtype, result.sizes, result.strides)
        return [
            _WHOLE if is_whole else _VIEW, result.index, scalar_type(result.dtype), result.offset,
            len(result.sizes), *result.sizes, *result.strides,
        ]  # fmt: skip


def scalar_type(dtype: torch.dtype) -> int:
    """Return the number of a dtype in C++."""
    if dtype not in _SCALAR_TYPES:
        raise NoPlanError(f"it uses a tensor of {dtype}, which plans do not have")
    return _SCALAR_TYPES[dtype]


def signed(bits: int) -> int:
    """Return 64 bits as a signed number."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def to_wire(value: Any) -> Any:
    """Return a plan, or a part of one, as JSON."""
    if is_dataclass(value):
        parts = {part.name: to_wire(getattr(value, part.name)) for part in fields(value)}
        return {"is": type(value).__name__, **parts}
    if isinstance(value, tuple):
        return [to_wire(item) for item in value]
    return str(value) if isinstance(value, torch.dtype | torch.device) else value


def from_wire(wire: Any) -> Any:
    """Return what ``to_wire`` was given; raise ValueError, TypeError or RuntimeError if it is something else."""
    if isinstance(wire, dict):
        kind = globals().get(str(wire.get("is")))
        if not isinstance(kind, type) or not is_dataclass(kind):
            raise ValueError(f"a plan has no part {wire.get('is')!r}")
        return kind(**{name: from_wire(value) for name, value in wire.items() if name != "is"})
    if isinstance(wire, list):
        return tuple(map(from_wire, wire))
    if isinstance(wire, str):
        dtype = getattr(torch, wire.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else torch.device(wire)
    if wire is None or isinstance(wire, int):
        return wire
    raise ValueError(f"a plan has a {type(wire).__name__}")
