"""Record the calls of some operators while a model runs.

Arguments are recorded as data, and the contents of tensors as bytes in the arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from opforge.cases.text import format_arguments
from opforge.cases.values import TensorSpec, Value, contiguous_strides
from opforge.cases.wire import SHORT_DTYPES, encode, from_torch, spec_row
from opforge.runtime.trees import map_instances
from opforge.sandbox.guest.worker import ARENA_ALIGNMENT

MAX_CONTENTS_BYTES = 256 << 20
"""Maximum size of the contents in one reply."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an operator in a run."""

    number: int
    op: str
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""
    text: str = ""
    """The case as text; empty if it cannot be recorded."""
    tree: list[Any] | None = None
    """The arguments as JSON."""

    def wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, row: Any) -> RecordedCall:
        """Return a call of an untrusted reply; raises TypeError or ValueError if it is malformed."""
        call = cls(**row)
        texts = (call.op, call.phase, call.text)
        if not isinstance(call.number, int) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a recorded call has fields of other types")
        return call


class CallRecorder:
    """Records calls from a number on, until the space for their contents is used up."""

    def __init__(
        self,
        arena: mmap.mmap,
        offset: int,
        first_call: int,
        device: torch.device,
        in_optimizer_step: Callable[[], bool],
    ) -> None:
        self._arena = arena
        self._in_optimizer_step = in_optimizer_step
        self._offset = self._begin = offset
        self._end = min(offset + MAX_CONTENTS_BYTES, len(arena))
        self._first_call = first_call
        self._device = device
        self._full = False
        self.call_count = 0
        """Number of calls so far."""
        self.calls: list[RecordedCall] = []

    @property
    def used_bytes(self) -> int:
        """Return the number of bytes of the contents."""
        return self._offset - self._begin

    def wrap(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ATen's function of an operator, wrapped to record its calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.call_count >= self._first_call and not self._full:
                self._record(op, args, kwargs)
            self.call_count += 1
            return original(*args, **kwargs)

        return call

    def _record(self, op: str, args: Any, kwargs: dict[str, Any]) -> None:
        call = RecordedCall(self.call_count, op, self._phase())
        offset_before = self._offset
        try:
            positional = tuple(from_torch(a, self._tensor) for a in args)
            named = {n: from_torch(v, self._tensor) for n, v in kwargs.items()}
        except (TypeError, MemoryError) as error:
            self._full = isinstance(error, MemoryError) and offset_before > self._begin
            self._offset = offset_before
            if not self._full:
                self.calls.append(call)
            return
        text = format_arguments(
            [_without_offsets(v) for v in positional], {n: _without_offsets(v) for n, v in named.items()}
        )
        tree = [
            encode([_without_ranges(v) for v in positional], spec_row),
            {n: encode(_without_ranges(v), spec_row) for n, v in named.items()},
        ]
        self.calls.append(replace(call, text=text, tree=tree))

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # torch has no public way to ask
            return "backward"
        return "optimizer" if self._in_optimizer_step() else "forward"

    def _tensor(self, value: torch.Tensor) -> TensorSpec:
        """Return a tensor as data; its contents, from the first element on, go to the arena."""
        if value.layout != torch.strided or value.is_quantized or value.dtype not in SHORT_DTYPES:
            raise TypeError(f"a case cannot hold a tensor of layout {value.layout}, dtype {value.dtype}")
        value = value.detach().resolve_conj().resolve_neg()
        shape, strides = tuple(value.shape), tuple(value.stride())
        device = None if value.device.type == self._device.type else str(value.device)
        spec = TensorSpec(
            shape, SHORT_DTYPES[value.dtype], None if strides == contiguous_strides(shape) else strides, device=device
        )
        nbytes = spec.storage_nbytes
        if self._offset + nbytes > self._end:
            raise MemoryError(f"its inputs take more than {MAX_CONTENTS_BYTES >> 20} MiB")
        offset = self._offset
        if nbytes:
            count = nbytes // value.element_size()
            flat = value.as_strided((count,), (1,), value.storage_offset()).cpu().view(torch.uint8)
            torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=offset).copy_(flat)
        self._offset = offset + nbytes + (-nbytes % ARENA_ALIGNMENT)
        low, high = _range(value)
        return replace(spec, at=offset - self._begin if nbytes else None, low=low, high=high)


def _range(value: torch.Tensor) -> tuple[int | None, int | None]:
    """Return the range of seeded contents that can replace a tensor's own.

    It is set only for integers, which are often indices.
    """
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or not value.numel():
        return None, None
    integers = value.to(torch.int64)
    return int(integers.min()), int(integers.max()) + 1


def _without_offsets(value: Value) -> Value:
    """Return a value without the offsets of contents, which exist only in this arena."""
    changed: Value = map_instances(value, TensorSpec, lambda spec: replace(spec, at=None))
    return changed


def _without_ranges(value: Value) -> Value:
    """Return a value without the ranges of contents, as it has the contents themselves."""
    changed: Value = map_instances(value, TensorSpec, lambda spec: replace(spec, low=None, high=None))
    return changed
