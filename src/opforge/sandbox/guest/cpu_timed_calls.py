"""The timed calls of one case on a CPU. The judge writes inputs and reads results in this process.

After each call the address of its result goes into a table in the arena. When the judge stops this
process, the result is whatever lies at that address.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opforge.cases.tensors import tensor_from_row
from opforge.cases.wire import decode

WORDS_PER_PART = 2
"""Words in the table for each part of a result.

The first is a tensor's address, or 1 for a number or no memory. The second holds a number's bits.
"""


class HostTimedCalls:
    """Calls of a function, each on its own inputs."""

    def __init__(self, function: Callable[..., Any], case: dict[str, Any], arena: Any, table_offset: int) -> None:
        self._function = function
        self._case = case
        self._arena = arena
        self._table_offset = table_offset
        self._table = memoryview(b"")
        self._step = WORDS_PER_PART
        self._sets: list[tuple[list[Any], dict[str, Any], list[Tensor]]] = []
        self._kept: list[Any] = []
        self._around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def call_instead(
        self, function: Callable[..., Any], around: Callable[[Any], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Call another function. ``around`` surrounds each block of calls, and gets their arguments."""
        self._function, self._around = function, around

    def allocate(self, sets: int, parts: int) -> dict[str, Any]:
        """Allocate inputs for ``sets`` calls and return their addresses.

        The memory is new. Results have ``parts`` parts.
        """
        self._kept = []
        self._sets, old = [self.new_set() for _ in range(sets)], self._sets
        del old  # not earlier: the new ones need other addresses
        self._step = WORDS_PER_PART * parts
        self._table = memoryview(self._arena)[self._table_offset :][: 8 * self._step * sets].cast("Q")
        return {"inputs": [[t.untyped_storage().data_ptr() for t in tensors] for _, _, tensors in self._sets]}

    def run(self, *, dry: bool) -> None:
        """Make the calls; ``dry`` does everything except the calls, with the existing results."""
        with self._around(self._sets):
            function, table = self._function, self._table
            if dry:
                for start, result in zip(range(0, len(table), self._step), self._kept, strict=True):
                    if type(result) is Tensor:
                        table[start] = result.data_ptr() or 1
                    else:
                        self._write_entry(start, result)
                return
            self._kept = kept = []  # freeing results is part of the work: a kernel may do something then
            for start, (args, kwargs, _) in zip(range(0, len(table), self._step), self._sets, strict=True):
                result = function(*args, **kwargs)
                kept.append(result)
                if type(result) is Tensor:
                    table[start] = result.data_ptr() or 1
                else:
                    self._write_entry(start, result)

    def result(self, call: int) -> tuple[Any, list[Tensor]]:
        """Return the result of one of the last calls, and its inputs as they are now."""
        return self._kept[call], self._sets[call][2]

    def _write_entry(self, start: int, result: Any) -> None:
        """Write the parts of a result into the table, the first last: it marks the return."""
        parts = result_parts(result)[: self._step // WORDS_PER_PART]
        for part, place in reversed(list(zip(parts, range(start, start + self._step, WORDS_PER_PART), strict=False))):
            if isinstance(part, Tensor):
                self._table[place] = part.data_ptr() or 1
            else:
                self._table[place + 1] = double_bits(part)
                self._table[place] = 1
        if not parts:
            self._table[start] = 1

    def new_set(self) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
        """Return arguments in newly allocated memory."""
        tensors: list[Tensor] = []

        def tensor(row: list[Any]) -> Tensor:
            like = tensor_from_row(self._arena, row)
            memory = torch.empty(row[1], dtype=torch.uint8).untyped_storage()
            tensors.append(
                torch.empty(0, dtype=like.dtype).set_(memory, like.storage_offset(), like.shape, like.stride())
            )
            return tensors[-1]

        args = decode(self._case["args"], tensor)
        return args, {n: decode(v, tensor) for n, v in self._case["kwargs"].items()}, tensors


def result_parts(result: Any) -> list[Any]:
    """Return the tensors and numbers of a result, in order."""
    if isinstance(result, list | tuple):
        return [part for value in result for part in result_parts(value)]
    return [result] if isinstance(result, Tensor | bool | int | float) else []


def double_bits(number: float) -> int:
    """Return a number as the bits of a double, or 0 if it does not fit."""
    try:
        return int(struct.unpack("<Q", struct.pack("<d", number))[0])
    except OverflowError:
        return 0


HOST_KERNEL_CALLERS = (HostTimedCalls.run.__code__,)
"""Functions that call kernels, and no operator besides."""
