"""Put the inputs of some cases of one operator side by side, in the judge's memory and in the worker's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Expect, Phase
from opforge.cases.encoding import tree_of
from opforge.cases.materialise import Bytes, write_storage
from opforge.cases.values import TensorSpec
from opforge.judge.reference import Call
from opforge.ops import Operator
from opforge.sandbox.worker import ALIGN

MAX_CASES = 96
MAX_BYTES = 16 << 20
INPUTS_AT = ALIGN
"""The first bytes of the arena are the worker's counter."""


@dataclass(frozen=True, slots=True)
class CaseRow:
    """A case as it came to the judge."""

    id: str
    args: str
    tree: str
    expect: Expect
    phase: Phase
    blob: str

    @classmethod
    def from_wire(cls, row: list[str]) -> CaseRow:
        return cls(row[0], row[1], row[2], Expect(row[3]), Phase(row[4]), row[5])


@dataclass(frozen=True, slots=True)
class Placed:
    """A case whose inputs lie in the batch's memory."""

    case: CaseRow
    call: Call
    inputs: list[list[Any]]
    """The rows of its tensors."""
    again: bool = False
    """A second run of the case before it."""

    def request(self) -> dict[str, Any]:
        wire = {"args": self.call.args, "kwargs": self.call.kwargs}
        return wire if self.call.seed is None else {**wire, "seed": self.call.seed}


class Batch:
    """The inputs of some cases, in memory that is the judge's own; ``buffer`` is lent from batch to batch."""

    def __init__(
        self, op: Operator, device: torch.device, capacity: int, blobs: Mapping[str, Bytes], buffer: Bytes
    ) -> None:
        self._op = op
        self._device = device
        self._blobs = blobs
        self._capacity = capacity
        self._buffer = buffer
        self.used = INPUTS_AT
        self.placed: list[Placed] = []

    @property
    def full(self) -> bool:
        return len(self.placed) >= MAX_CASES or self.used >= MAX_BYTES

    def add(self, case: CaseRow, *, again: bool = False) -> bool:
        """Place a case; False when it must wait for the next batch because no room is left."""
        args, kwargs = json.loads(case.tree or tree_of(case.args))
        rows = list(_rows([args, kwargs]))
        need = sum(_aligned(row[1]) for row in rows)
        if self.used + need > self._capacity:
            raise MemoryError(f"its inputs take {need} bytes, more than the {self._capacity} that a worker's arena has")
        if self.used + need > len(self._buffer):
            if self.placed:
                return False
            self._buffer = np.zeros(self.used + need, np.uint8)
        for index, row in enumerate(rows):
            self._place(row, f"{case.id}:{index}", self._blobs.get(case.blob))
        own = self._op.mutates or self._device.type != "cpu"
        seed = int(case.id, 16) % (1 << 62) if self._op.random else None
        call = Call(self._op.name, args, kwargs, self._buffer, self._device, own, seed)
        self.placed.append(Placed(case, call, rows, again))
        return True

    def copy_to(self, arena: Bytes) -> None:
        arena[INPUTS_AT : self.used] = self._buffer[INPUTS_AT : self.used]

    def touched(self, arena: Bytes) -> list[list[int]]:
        """Return, for each case, the inputs whose bytes in the arena are no longer those that were put there."""
        if np.array_equal(arena[INPUTS_AT : self.used], self._buffer[INPUTS_AT : self.used]):
            return [[] for _ in self.placed]
        return [
            [
                i
                for i, (at, n, *_) in enumerate(p.inputs)
                if not np.array_equal(arena[at : at + n], self._buffer[at : at + n])
            ]
            for p in self.placed
        ]

    def _place(self, row: list[Any], seed: str, blob: Bytes | None) -> None:
        stored, nbytes, dtype, shape, strides, offset, device, *bounds = row
        at = self.used
        spec = TensorSpec(tuple(shape), dtype, tuple(strides), offset, device, stored, nbytes, *bounds)
        write_storage(spec, self._buffer[at : at + nbytes], blob, seed)
        row[0] = at
        del row[7:]
        self.used = at + _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return nbytes + (-nbytes % ALIGN)


def _rows(tree: Any) -> Iterable[list[Any]]:
    """Return the rows of the tensors in a JSON tree, in the order in which ``decode`` meets them."""
    if isinstance(tree, list):
        for value in tree:
            yield from _rows(value)
    elif isinstance(tree, dict):
        if "T" in tree and isinstance(tree["T"], list):
            yield tree["T"]
        else:
            for value in tree.values():
                yield from _rows(value)
