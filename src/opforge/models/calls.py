"""Record the calls of some operators while a model runs.

Arguments are recorded as data, and the contents of tensors as bytes in the arena.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from opforge.cases.encoding import SHORT_DTYPES, encode, from_torch, spec_row
from opforge.cases.text import format_arguments
from opforge.cases.values import TensorSpec, Value, contiguous_strides
from opforge.sandbox.worker import ALIGN

MOST_BYTES = 256 << 20
"""Maximum size of the contents handed out at a time."""


class CallRecorder:
    """Records calls from a number on, until the space for their contents is used up."""

    def __init__(
        self, arena: mmap.mmap, at: int, start: int, device: torch.device, learning: Callable[[], bool]
    ) -> None:
        self._arena = arena
        self._in_optimizer_step = learning
        self._at = self._begin = at
        self._end = min(at + MOST_BYTES, len(arena))
        self._start = start
        self._device = device
        self._full = False
        self.seen = 0
        """Number of calls so far."""
        self.calls: list[dict[str, Any]] = []

    @property
    def used(self) -> int:
        """Return the number of bytes of the contents."""
        return self._at - self._begin

    def function(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ATen's function of an operator, wrapped to record its calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.seen >= self._start and not self._full:
                self._take(op, args, kwargs)
            self.seen += 1
            return original(*args, **kwargs)

        return call

    def _take(self, op: str, args: Any, kwargs: dict[str, Any]) -> None:
        head = {"number": self.seen, "op": op, "phase": self._phase()}
        offset_before = self._at
        try:
            positional = tuple(from_torch(a, self._tensor) for a in args)
            named = {n: from_torch(v, self._tensor) for n, v in kwargs.items()}
        except (TypeError, MemoryError) as error:
            self._full = isinstance(error, MemoryError) and offset_before > self._begin
            self._at = offset_before
            if not self._full:
                self.calls.append({**head, "lost": str(error)})
            return
        text = format_arguments([_plain(v) for v in positional], {n: _plain(v) for n, v in named.items()})
        tree = [
            encode([_placed(v) for v in positional], spec_row),
            {n: encode(_placed(v), spec_row) for n, v in named.items()},
        ]
        self.calls.append({**head, "text": text, "tree": tree})

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
        if self._at + nbytes > self._end:
            raise MemoryError(f"its inputs take more than {MOST_BYTES >> 20} MiB")
        offset = self._at
        if nbytes:
            count = nbytes // value.element_size()
            flat = value.as_strided((count,), (1,), value.storage_offset()).cpu().view(torch.uint8)
            torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=offset).copy_(flat)
        self._at = offset + nbytes + (-nbytes % ALIGN)
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


def _changed(value: Value, **fields: Any) -> Value:
    if isinstance(value, TensorSpec):
        return replace(value, **fields)
    if isinstance(value, list):
        return [_changed(v, **fields) for v in value]
    return tuple(_changed(v, **fields) for v in value) if isinstance(value, tuple) else value


def _plain(value: Value) -> Value:
    """Return a value without the offsets of contents, which exist only in this arena."""
    return _changed(value, at=None)


def _placed(value: Value) -> Value:
    """Return a value without the ranges of contents, as it has the contents themselves."""
    return _changed(value, low=None, high=None)
