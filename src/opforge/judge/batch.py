"""Lay out the inputs of several cases of one operator in the judge's and the worker's memory."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Expect, Phase
from opforge.cases.encoding import decode, tree_of
from opforge.cases.forms import LARGE_FORMS, ONE_TENSOR_TWICE, SAME_ELEMENTS
from opforge.cases.materialise import Bytes, tensor_over, write_storage
from opforge.cases.twists import MAY_RAISE, TWISTS, Inputs, Twist, changed_contents
from opforge.cases.values import TensorSpec
from opforge.judge.asked import AskedCall, Reference
from opforge.judge.properties import CHECKS_POSITIONS, LAYOUT_IS_INPUT, UNDEFINED_CONTENTS, WRITES_UNSAID
from opforge.judge.reference import Answer, Call, alike, end_without_device, same_dtypes, tensors_of
from opforge.judge.trees import INPUTS_AT, aligned, rows_of, storage_bytes, with_rows
from opforge.judge.verdict import FAULT, REFERENCE_FAULT
from opforge.ops import Form, Operator
from opforge.sandbox.loader import aten_function
from opforge.sandbox.situations import (
    DEFAULT_DTYPE,
    KEPT_RESULTS,
    LAZY_CLONE,
    OTHER_DEFAULT_DTYPE,
    REQUIRES_GRAD,
    SITUATIONS,
)

MAX_CASES = 192
MAX_BYTES = 16 << 20
_MAX_RESULT_GROWTH = 4
"""Results of a large form may have this many times the elements of its inputs."""
_SMALL_EXTENTS = (16, 32)
_LONG_EXTENT = 64
"""Longer dimensions of a large form are cut, to estimate how its results grow."""
ARGUMENT = "argument:"
"""Prefix of the names of forms in which one argument has another value."""

_NOT_FOR_USER_REFERENCE = frozenset({"one_transposed", ONE_TENSOR_TWICE})
"""Forms not used with a user's reference.

It promises neither strides for inputs of mixed layouts nor support for one tensor given twice."""
_INDEX_ARGUMENTS = frozenset({
    "index", "indices", "max_indices", "maximum_indices", "offsets", "offset2bag", "bag_size", "target", "boundaries", "sorted_sequence",
    "sorter", "repeats", "batch_sizes", "lengths", "input_lengths", "target_lengths", "hash", "pivots", "LU_pivots", "crow_indices",
    "col_indices", "ccol_indices", "row_indices", "compressed_indices", "plain_indices", "cum_seq_q", "cum_seq_k", "offs", "dims",
})  # fmt: skip
"""Arguments that hold indices or must be sorted; integer inputs then keep their contents."""
_OUT_FILL_VALUE = 7
"""Value of all elements of a large `out` before the call."""
_RETIME_ABOVE_S = 0.1
"""A slower call on a GPU may have initialised the device or a library, and is timed again."""


@dataclass(frozen=True, slots=True)
class CaseRow:
    """A case as received by the judge."""

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
    """A case in one of its forms, with its inputs in the batch's memory."""

    case: CaseRow
    call: Call
    inputs: list[list[Any]]
    """Wire rows of its tensors."""
    answer: Answer
    """Answer of ATen or of the user's reference."""
    form: str = ""
    """Empty for the unchanged case, else ``again``, ``replayed``, ``reordered``, ``argument:NAME``,
    or the name of a twist or a situation."""
    begin_at: tuple[int, ...] = ()
    """For a replay: offsets of the contents that the worker puts into each tensor first."""
    aten_s: float = 0.0
    """Seconds that ATen took for the unchanged case."""

    @property
    def expect(self) -> Expect:
        """Expected behaviour of the kernel: to raise, if the form may raise and ATen does."""
        return Expect.RAISES if self.form in MAY_RAISE and self.answer.raised is not None else self.case.expect

    def request(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"args": self.call.args, "kwargs": self.call.kwargs}
        wire |= {"own": self.call.own, "positions": self.call.positions}
        if self.call.seed is not None:
            wire["seed"] = self.call.seed
        if self.form in SITUATIONS:
            wire["situation"] = self.form
        wire["large" if self.form in LARGE_FORMS else "elements"] = max(
            (math.prod(row[3]) for row in self.inputs), default=0
        )
        return {**wire, "begin_at": self.begin_at} if self.begin_at else wire


@dataclass(frozen=True, slots=True)
class Tried:
    """Variants in which the cases of an operator have been run so far."""

    twists: Counter[str] = field(default_factory=Counter)
    dtypes: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    """By large form: dtypes of the cases run in it."""
    dims: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By large form: dimensions named by its cases with floating-point inputs."""


class Batch:
    """Inputs of several cases in the judge's own memory; batches reuse ``buffer``."""

    def __init__(
        self,
        op: Operator,
        device: torch.device,
        capacity: int,
        blobs: Mapping[str, Bytes],
        buffer: Bytes,
        reference: Reference | None = None,
        tried: Tried | None = None,
    ) -> None:
        self._op = op
        self._device = device
        self._blobs = blobs
        self._capacity = capacity
        self._buffer = buffer
        self._reference = reference
        """Answers in place of ATen, for a user's own operator."""
        self.used = INPUTS_AT
        self._results = 0
        """Bytes returned by the calls so far."""
        self.aten_s = 0.0
        """Seconds of ATen's slowest call of an unchanged case."""
        self.placed: list[Placed] = []
        self.defects: dict[str, list[str]] = {}
        """By case: layouts in which ATen's own answer differs."""
        self.tried = Tried() if tried is None else tried
        self.slow: dict[str, float] = {}
        """By case: seconds of one call of ATen, where it is too slow to run all variants."""

    def _agrees_with_plain(self, name: str, plain: Answer, twisted: Answer) -> bool:
        """Whether ATen's answer to a hostile form agrees with its answer to the unchanged case."""
        if name in SAME_ELEMENTS:
            return not self._same_in_any_layout(plain) or alike(plain, twisted)
        return name != "empty" or same_dtypes(plain, twisted)

    def _same_in_separate_memory(self, first: Placed, tensors: list[torch.Tensor], name: str, answer: Answer) -> bool:
        """Whether the answer equals that to the same elements in separate memory.

        Checked for expanded inputs of a user's reference, for rows with gaps, and for one tensor
        given for two arguments.
        """
        expanded = self._reference is not None and name in ("expanded", "expanded_last")
        if answer.drew or not (expanded or name in ("long_pitched", ONE_TENSOR_TWICE)):
            return True
        if name == ONE_TENSOR_TWICE:
            call = self._other(first, [t.clone() for t in tensors])
            return call is not None and alike(replace(call.run(), inputs=[]), replace(answer, inputs=[]))
        call = self._other(first, [t.contiguous() for t in tensors])
        return call is None or alike(call.run(), answer)

    def at_fault(self, plain: Answer, placed: Placed) -> bool:
        """Whether ATen's answer to a hostile layout uses uninitialised memory; record it if so."""
        if (
            placed.form not in SAME_ELEMENTS
            or not self._same_in_any_layout(plain)
            or alike(plain, placed.call.run_poisoned())
        ):
            return False
        self.defects.setdefault(placed.case.id, []).append(placed.form)
        return True

    def _same_in_any_layout(self, plain: Answer) -> bool:
        """Whether the operator's answer is independent of the memory layout of its inputs."""
        return not plain.drew and self._op.base not in UNDEFINED_CONTENTS | LAYOUT_IS_INPUT

    @property
    def authority(self) -> str:
        return self._op.authority

    @property
    def fault(self) -> str:
        """Note that says why something was not judged."""
        return FAULT if self._reference is None else REFERENCE_FAULT

    @property
    def full(self) -> bool:
        return len(self.placed) >= MAX_CASES or self.used >= MAX_BYTES

    def add(self, case: CaseRow) -> Placed | None:
        """Place a case; return None when it must wait for the next batch because memory is full."""
        args, kwargs = json.loads(case.tree or tree_of(case.args))
        rows = list(rows_of([args, kwargs]))
        need = sum(aligned(row[1]) for row in rows)
        used_before = self.used
        if self.used + need > self._capacity:
            raise MemoryError(f"its inputs take {need} bytes, more than the {self._capacity} that a worker's arena has")
        if self.used + need > len(self._buffer):
            if self.placed:
                return None
            self._buffer = np.zeros(self.used + need, np.uint8)
        for index, row in enumerate(rows):
            self._place(row, f"{case.id}:{index}", self._blobs.get(case.blob))
        seed = int(case.id, 16) % (1 << 62) if self._op.random else None
        call = self._call(args, kwargs, seed)
        began = time.perf_counter()
        answer = call.run()
        aten_s = time.perf_counter() - began
        if aten_s > _RETIME_ABOVE_S and self._device.type == "cuda":
            began = time.perf_counter()
            call.run()
            aten_s = min(aten_s, time.perf_counter() - began)
        self.aten_s = max(self.aten_s, aten_s)
        if not self._reserve_results(call, answer):
            if self.placed:
                self.used = used_before
                return None
            raise MemoryError(
                f"its results take more than the {self._capacity} bytes that a worker's arena has for them"
            )
        placed = Placed(case, call, rows, answer, aten_s=aten_s)
        self.placed.append(placed)
        return placed

    def _reserve_results(self, call: Call, answer: Answer) -> bool:
        """Reserve memory for the results of a call, and for inputs that are not read in place.

        Return False when too little is left.
        """
        returned = [*tensors_of(answer.result), *(answer.inputs if call.own else ())] if answer.raised is None else []
        need = sum(aligned(t.numel() * t.element_size()) for t in returned)
        if self._results + need > self._capacity:
            return False
        self._results += need
        return True

    def again(self, first: Placed) -> None:
        """Run a case that was just placed a second time, if memory is left."""
        if self._reserve_results(first.call, first.answer):
            self.placed.append(replace(first, form="again"))

    def situate(self, first: Placed, situation: str) -> bool:
        """Place a case again, to be called in another situation.

        Return False where the situation does not apply, ATen rejects it, or memory is full.
        """
        call, answer = first.call, first.answer
        writes = self._op.mutates or self._op.base in WRITES_UNSAID or self._reference is not None
        if situation in (KEPT_RESULTS, REQUIRES_GRAD) and writes:
            return False  # it can run only once on its inputs, and may resize them
        if situation == LAZY_CLONE and writes and any(not row[1] for row in first.inputs):
            return False  # torch cannot resize lazy clones of empty tensors
        if situation == DEFAULT_DTYPE and self._reference is None:
            call = replace(call, default_dtype=OTHER_DEFAULT_DTYPE)
            if (other := self._answer(call)) is None:
                return False
            answer = other
        elif situation == DEFAULT_DTYPE or not self._reserve_results(call, answer):
            return False
        self.placed.append(replace(first, call=call, answer=answer, form=situation))
        return True

    def twist(self, first: Placed, inputs: Inputs, name: str) -> bool:
        """Place a hostile form; False if there is none, ATen rejects it, or memory is full."""
        if name in _NOT_FOR_USER_REFERENCE and self._reference is not None:
            return False
        tensors = _made(TWISTS[name], inputs)
        self.tried.twists[name] += tensors is not None
        if tensors is None or (call := self._other(first, tensors)) is None:
            return False
        if name in LARGE_FORMS and not (inputs.pointwise or self._stays_moderate(call, tensors)):
            return False
        if name in LARGE_FORMS and inputs.blank and not inputs.pointwise:
            after = replace(call, device=torch.device("cpu")).run()  # ATen resizes `out`
            tensors = [
                t.new_full(sized.shape, _OUT_FILL_VALUE) if i in inputs.blank else t
                for i, (t, sized) in enumerate(zip(tensors, after.inputs, strict=True))
            ]
            if after.raised is not None or (call := self._other(first, tensors)) is None:
                return False
        may_raise = name in MAY_RAISE and self._device.type == "cpu" and self._reference is None
        if (answer := self._answer(call, may_raise=may_raise)) is None:
            return False
        if answer.raised is None and not (
            self._agrees_with_plain(name, first.answer, answer)
            and self._same_in_separate_memory(first, tensors, name, answer)
        ):
            self.defects.setdefault(first.case.id, []).append(name)
            return False
        self.placed.append(Placed(first.case, call, list(rows_of([call.args, call.kwargs])), answer, name))
        return True

    def enlarge(self, first: Placed, inputs: Inputs, name: str) -> None:
        """Place a large form of a case, if there is one, and record it in ``tried``."""
        if self.twist(first, inputs, name):
            self.tried.dtypes[name].add(dtypes_of(first))
            if inputs.has_floats:
                self.tried.dims[name].add(inputs.dim)

    def _stays_moderate(self, call: Call, tensors: list[torch.Tensor]) -> bool:
        """Whether results are not much larger than inputs, extrapolated from two small sizes."""
        try:
            small, larger = (self._result_elements(call, tensors, extent) for extent in _SMALL_EXTENTS)
        except Exception:  # noqa: BLE001  # ATen rejects the call at that size: nothing is known
            return False
        longest = max((size for t in tensors for size in t.shape), default=1)
        power = math.log2(max(larger, 1) / max(small, 1))
        max_elements = _MAX_RESULT_GROWTH * sum(t.numel() for t in tensors)
        return bool(max(small, 1) * (longest / _SMALL_EXTENTS[0]) ** power <= max_elements)

    def _result_elements(self, call: Call, tensors: list[torch.Tensor], extent: int) -> int:
        """Return the number of elements of ATen's results with long dimensions cut to an extent."""
        cut = (t[tuple(slice(extent if size > _LONG_EXTENT else None) for size in t.shape)].clone() for t in tensors)
        args = decode(call.args, lambda _row: next(cut))
        kwargs = {name: decode(value, lambda _row: next(cut)) for name, value in call.kwargs.items()}
        with torch.no_grad():
            return sum(t.numel() for t in tensors_of(aten_function(call.op)(*args, **kwargs)))

    def argument(self, first: Placed, name: str, value: Any) -> bool:
        """Place a case with another argument value; False if ATen rejects it or memory is full."""
        call = replace(first.call, **_with_argument(self._op, first.call, name, value))
        if (answer := self._answer(call)) is None:
            return False
        rows = list(rows_of([call.args, call.kwargs]))
        self.placed.append(Placed(first.case, call, rows, answer, f"{ARGUMENT}{name}"))
        return True

    def replay(self, first: Placed, inputs: Inputs, name: str) -> bool:
        """Place a case with other or reordered contents.

        The worker writes them into the tensors of a first call, and calls again.
        """
        tensors = _made(functools.partial(changed_contents, reordered=name == "reordered"), inputs)
        if tensors is None or (call := self._other(first, tensors)) is None:
            return False
        if (answer := self._answer(call)) is None:
            return False
        rows = list(rows_of([call.args, call.kwargs]))
        begin_at = tuple(row[0] for row in first.inputs)
        self.placed.append(Placed(first.case, call, rows, answer, name, begin_at))
        return True

    def _answer(self, call: Call, *, may_raise: bool = False) -> Answer | None:
        """Return ATen's answer to a new form; None when ATen rejects it or memory is full.

        On a GPU, the form runs on the CPU first. Inputs that would end the GPU's context (an index
        out of range, a probability above one) raise an error there.
        """
        harmless = self._device.type == "cpu" or self._reference is not None
        if not harmless and replace(call, device=torch.device("cpu")).run().raised is not None:
            return None
        answer = call.run()
        if answer.raised is not None and not may_raise:
            return None
        return answer if self._reserve_results(call, answer) else None

    def inputs(self, first: Placed) -> Inputs:
        """Return the tensors of a placed case, to be twisted."""
        tensors = tuple(tensor_over(self._buffer, row) for row in first.inputs)
        written = frozenset(written_tensors(self._op, first.call))
        pointwise = "pointwise" in self._op.tags
        return Inputs(
            tensors,
            written,
            written if self._op.form is Form.OUT else frozenset(),
            pointwise,
            indexes=first.call.positions,
            counts="dynamic_output_shape" in self._op.tags,
            numbers=tuple(_numbers([first.call.args, first.call.kwargs])),
            positions=frozenset(self._checked_positions(first.call)),
            dim=self._dim(first.call),
            seed=int(first.case.id[:12], 16),
        )

    def _checked_positions(self, call: Call) -> Iterator[int]:
        if self._op.base in CHECKS_POSITIONS:
            yield from tensors_of_arguments(self._op, call, {"index", "indices"})

    def _dim(self, call: Call) -> int:
        """Return the first dimension that a call names, or -1 for the last."""
        dim = named_arguments(self._op, call).get("dim", -1)
        dim = dim[0] if isinstance(dim, list) and dim else dim
        return dim if isinstance(dim, int) else -1

    def _other(self, first: Placed, tensors: list[torch.Tensor]) -> Call | None:
        """Return a copy of a call with other tensors; None when there is no memory for them."""
        need = sum(aligned(t.untyped_storage().nbytes()) for t in tensors)
        if self.used + need > min(len(self._buffer), self._capacity):
            return None
        rows: list[list[Any]] = []
        rows_by_tensor: dict[tuple[int, str], list[Any]] = {}
        for row, tensor in zip(first.inputs, tensors, strict=True):
            if (row_of_same := rows_by_tensor.get((id(tensor), row[6]))) is not None:
                rows.append(row_of_same)
                continue
            contents = storage_bytes(tensor)
            start = self.used
            self._buffer[start : start + len(contents)] = contents
            geometry = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
            rows.append([start, len(contents), row[2], *geometry, row[6]])
            rows_by_tensor[id(tensor), row[6]] = rows[-1]
            self.used = start + aligned(len(contents))
        args, kwargs = with_rows([first.call.args, first.call.kwargs], iter(rows))
        return self._call(args, kwargs, first.call.seed)

    def _call(self, args: Any, kwargs: dict[str, Any], seed: int | None) -> Call:
        rows = list(rows_of([args, kwargs]))
        read = {a.name for a in self._op.arguments if a.type.startswith("Tensor") and not a.writes}
        values = all(row[2][0] in "iu" for row in rows) and not _INDEX_ARGUMENTS & read
        positions = "pointwise" not in self._op.tags and len(rows) > 1 and not values
        if self._reference is not None:
            return AskedCall(
                self._op.name, args, kwargs, self._buffer, self._device,
                own=True, seed=seed, positions=positions, reference=self._reference,
            )  # fmt: skip
        own = self._op.mutates or self._op.base in WRITES_UNSAID or self._device.type != "cpu"
        return Call(self._op.name, args, kwargs, self._buffer, self._device, own, seed, positions=positions)

    def copy_to(self, arena: Bytes) -> None:
        arena[INPUTS_AT : self.used] = self._buffer[INPUTS_AT : self.used]

    def touched(self, arena: Bytes) -> list[list[int]]:
        """Return, for each case, the inputs whose bytes in the arena have changed."""
        if np.array_equal(arena[INPUTS_AT : self.used], self._buffer[INPUTS_AT : self.used]):
            return [[] for _ in self.placed]
        return [
            [
                i
                for i, (start, n, *_) in enumerate(p.inputs)
                if not np.array_equal(arena[start : start + n], self._buffer[start : start + n])
            ]
            for p in self.placed
        ]

    def _place(self, row: list[Any], seed: str, blob: Bytes | None) -> None:
        stored, nbytes, dtype, shape, strides, offset, device, *bounds = row
        start = self.used
        spec = TensorSpec(tuple(shape), dtype, tuple(strides), offset, device, stored, nbytes, *bounds)
        write_storage(spec, self._buffer[start : start + nbytes], blob, seed)
        row[0] = start
        del row[7:]
        self.used = start + aligned(nbytes)


def dtypes_of(placed: Placed) -> tuple[str, ...]:
    """Return the dtypes of a case's tensors."""
    return tuple(row[2] for row in placed.inputs)


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers among encoded arguments, without those that describe tensors."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield float(value)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict) and "T" not in value:
        for item in value.values():
            yield from _numbers(item)


def named_arguments(op: Operator, call: Call) -> dict[str, Any]:
    """Return the encoded arguments of a call by name."""
    return dict(zip((a.name for a in op.arguments), call.args, strict=False)) | call.kwargs


def written_tensors(op: Operator, call: Call) -> Iterator[int]:
    """Yield the indices of a call's tensors that its operator writes to."""
    return tensors_of_arguments(op, call, {a.name for a in op.arguments if a.writes})


def tensors_of_arguments(op: Operator, call: Call, wanted: AbstractSet[str]) -> Iterator[int]:
    """Yield the indices of a call's tensors that belong to some arguments."""
    names = [*(a.name for a in op.arguments)][: len(call.args)] + list(call.kwargs)
    number = 0
    for name, value in zip(names, [*call.args, *call.kwargs.values()], strict=True):
        count = sum(1 for _ in rows_of(value))
        if name in wanted:
            yield from range(number, number + count)
        number += count


def _made(twist: Twist, inputs: Inputs) -> list[torch.Tensor] | None:
    """Return the tensors of a form; None where torch cannot make them in their dtype."""
    try:
        return twist(inputs)
    except RuntimeError as error:
        end_without_device(error)
        return None


def _with_argument(op: Operator, call: Call, name: str, value: Any) -> dict[str, Any]:
    """Return a call's arguments with another value for one of them, by position where possible."""
    position = [a.name for a in op.arguments].index(name)
    if name not in call.kwargs and position < len(call.args):
        return {"args": [*call.args[:position], value, *call.args[position + 1 :]], "kwargs": call.kwargs}
    if name not in call.kwargs and position == len(call.args) and not op.arguments[position].kwarg_only:
        return {"args": [*call.args, value], "kwargs": call.kwargs}
    return {"args": call.args, "kwargs": {**call.kwargs, name: value}}
