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
from opforge.cases.tensors import Bytes, tensor_from_row, write_storage
from opforge.cases.values import TensorSpec
from opforge.cases.variant_shapes import LARGE_VARIANT_NAMES, ONE_TENSOR_TWICE, SAME_ELEMENT_VARIANTS
from opforge.cases.variants import MAY_RAISE, VARIANTS, CallTensors, MakeVariant, changed_contents
from opforge.cases.wire import decode, json_tree
from opforge.judge.facts import facts_of
from opforge.judge.reference.aten import (
    CallOutcome,
    ReferenceCall,
    abort_if_gpu_lost,
    roughly_equal,
    same_dtypes,
)
from opforge.judge.reference.user import UserCall, UserReference
from opforge.judge.verdict import PYTORCH_DEFECT, REFERENCE_DEFECT
from opforge.judge.wire_arguments import INPUTS_OFFSET, aligned_size, replace_tensor_rows, storage_bytes, tensor_rows
from opforge.ops import Operator, SchemaKind
from opforge.ops.undefined import UNDEFINED_CONTENTS
from opforge.runtime.trees import instances
from opforge.sandbox.guest.loader import aten_function
from opforge.sandbox.guest.situations import (
    DEFAULT_DTYPE,
    KEPT_RESULTS,
    LAZY_CLONE,
    OTHER_DEFAULT_DTYPE,
    REQUIRES_GRAD,
    SITUATIONS,
)
from opforge.sandbox.host.request import CaseRequest

MAX_ENTRIES = 192
MAX_INPUT_BYTES = 16 << 20
_MAX_RESULT_GROWTH = 4
"""Results of a large variant may have this many times the elements of its inputs."""
_SMALL_EXTENTS = (16, 32)
_LONG_EXTENT = 64
"""Longer dimensions of a large variant are cut, to estimate how its results grow."""
ARGUMENT_PREFIX = "argument:"
"""Prefix of the names of variants in which one argument has another value."""

_NOT_FOR_USER_REFERENCE = frozenset({"one_transposed", ONE_TENSOR_TWICE})
"""Variants not used with a user's reference.

It promises neither strides for inputs of mixed layouts nor support for one tensor given twice."""
_INDEX_ARGUMENTS = frozenset({
    "index", "indices", "max_indices", "maximum_indices", "offsets", "offset2bag", "bag_size", "target", "boundaries",
    "sorted_sequence", "sorter", "repeats", "batch_sizes", "lengths", "input_lengths", "target_lengths", "hash",
    "pivots", "LU_pivots", "crow_indices", "col_indices", "ccol_indices", "row_indices", "compressed_indices",
    "plain_indices", "cum_seq_q", "cum_seq_k", "offs", "dims",
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
class BatchEntry:
    """A case in one of its variants, with its inputs in the batch's memory."""

    case: CaseRow
    call: ReferenceCall
    input_rows: list[list[Any]]
    """Wire rows of its tensors."""
    answer: CallOutcome
    """Answer of ATen or of the user's reference."""
    variant: str = ""
    """Empty for the unchanged case, else ``again``, ``replayed``, ``reordered``, ``argument:NAME``,
    or the name of a variant or a situation."""
    prefill_offsets: tuple[int, ...] = ()
    """For a replay: offsets of the contents that the worker puts into each tensor first."""
    aten_s: float = 0.0
    """Seconds that ATen took for the unchanged case."""

    @property
    def expect(self) -> Expect:
        """Expected behaviour of the kernel: to raise, if the variant may raise and ATen does."""
        return Expect.RAISES if self.variant in MAY_RAISE and self.answer.raised is not None else self.case.expect

    def request(self) -> CaseRequest:
        elements = max((math.prod(row[3]) for row in self.input_rows), default=0)
        is_large = self.variant in LARGE_VARIANT_NAMES
        return CaseRequest(
            self.call.args,
            self.call.kwargs,
            self.call.owns_storage,
            seed=self.call.rng_seed,
            situation=self.variant if self.variant in SITUATIONS else None,
            elements=None if is_large else elements,
            large_elements=elements if is_large else None,
            prefill_offsets=self.prefill_offsets or None,
        )


@dataclass(frozen=True, slots=True)
class TriedVariants:
    """Variants in which the cases of an operator have been run so far."""

    counts: Counter[str] = field(default_factory=Counter)
    dtypes: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    """By large variant: dtypes of the cases run in it."""
    dims: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By large variant: dimensions named by its cases with floating-point inputs."""


class Batch:
    """Inputs of several cases in the judge's own memory; batches reuse ``buffer``."""

    def __init__(
        self,
        op: Operator,
        device: torch.device,
        capacity_bytes: int,
        blobs: Mapping[str, Bytes],
        buffer: Bytes,
        reference: UserReference | None = None,
        tried: TriedVariants | None = None,
    ) -> None:
        self._op = op
        self._device = device
        self._blobs = blobs
        self._capacity_bytes = capacity_bytes
        self._buffer = buffer
        self._reference = reference
        """Answers in place of ATen, for a user's own operator."""
        self.used_bytes = INPUTS_OFFSET
        self._result_bytes = 0
        """Bytes returned by the calls so far."""
        self.aten_s = 0.0
        """Seconds of ATen's slowest call of an unchanged case."""
        self.entries: list[BatchEntry] = []
        self.aten_bugs: dict[str, list[str]] = {}
        """By case: layouts in which ATen's own answer differs."""
        self.tried = TriedVariants() if tried is None else tried
        self.slow_aten_s: dict[str, float] = {}
        """By case: seconds of one call of ATen, where it is too slow to run all variants."""

    def _agrees_with_original(self, variant: str, original_answer: CallOutcome, variant_answer: CallOutcome) -> bool:
        """Whether ATen's answer to a hostile variant agrees with its answer to the unchanged case."""
        if variant in SAME_ELEMENT_VARIANTS:
            return not self._is_layout_independent(original_answer) or roughly_equal(original_answer, variant_answer)
        return variant != "empty" or same_dtypes(original_answer, variant_answer)

    def _same_in_separate_memory(
        self, original: BatchEntry, tensors: list[torch.Tensor], variant: str, answer: CallOutcome
    ) -> bool:
        """Whether the answer equals that to the same elements in separate memory.

        Checked for expanded inputs of a user's reference, for rows with gaps, and for one tensor
        given for two arguments.
        """
        expanded = self._reference is not None and variant in ("expanded", "expanded_last")
        if answer.used_rng or not (expanded or variant in ("long_pitched", ONE_TENSOR_TWICE)):
            return True
        if variant == ONE_TENSOR_TWICE:
            call = self._call_with_tensors(original, [t.clone() for t in tensors])
            return call is not None and roughly_equal(replace(call.run(), inputs=[]), replace(answer, inputs=[]))
        call = self._call_with_tensors(original, [t.contiguous() for t in tensors])
        return call is None or roughly_equal(call.run(), answer)

    def is_aten_at_fault(self, original_answer: CallOutcome, entry: BatchEntry) -> bool:
        """Whether ATen's answer to a hostile layout uses uninitialised memory; record it if so."""
        if (
            entry.variant not in SAME_ELEMENT_VARIANTS
            or not self._is_layout_independent(original_answer)
            or roughly_equal(original_answer, entry.call.run_poisoned())
        ):
            return False
        self.aten_bugs.setdefault(entry.case.id, []).append(entry.variant)
        return True

    def _is_layout_independent(self, original_answer: CallOutcome) -> bool:
        """Whether the operator's answer is independent of the memory layout of its inputs."""
        undefined = original_answer.used_rng or self._op.base in UNDEFINED_CONTENTS
        return not undefined and not facts_of(self._op).layout_is_input

    @property
    def authority(self) -> str:
        return self._op.reference_name

    @property
    def fault_note(self) -> str:
        """Note that says why something was not judged."""
        return PYTORCH_DEFECT if self._reference is None else REFERENCE_DEFECT

    @property
    def is_full(self) -> bool:
        return len(self.entries) >= MAX_ENTRIES or self.used_bytes >= MAX_INPUT_BYTES

    def add(self, case: CaseRow) -> BatchEntry | None:
        """Place a case; return None when it must wait for the next batch because memory is full."""
        args, kwargs = json.loads(case.tree or json_tree(case.args))
        rows = list(tensor_rows([args, kwargs]))
        need = sum(aligned_size(row[1]) for row in rows)
        used_before = self.used_bytes
        if self.used_bytes + need > self._capacity_bytes:
            raise MemoryError(f"its inputs take {need} bytes, more than the {self._capacity_bytes} of a worker's arena")
        if self.used_bytes + need > len(self._buffer):
            if self.entries:
                return None
            self._buffer = np.zeros(self.used_bytes + need, np.uint8)
        for index, row in enumerate(rows):
            self._write_tensor(row, f"{case.id}:{index}", self._blobs.get(case.blob))
        seed = int(case.id, 16) % (1 << 62) if self._op.is_random else None
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
            if self.entries:
                self.used_bytes = used_before
                return None
            raise MemoryError(
                f"its results take more than the {self._capacity_bytes} bytes that a worker's arena has for them"
            )
        entry = BatchEntry(case, call, rows, answer, aten_s=aten_s)
        self.entries.append(entry)
        return entry

    def _reserve_results(self, call: ReferenceCall, answer: CallOutcome) -> bool:
        """Reserve memory for the results of a call, and for inputs that are not read in place.

        Return False when too little is left.
        """
        returned = (
            [*instances(answer.result, torch.Tensor), *(answer.inputs if call.owns_storage else ())]
            if answer.raised is None
            else []
        )
        need = sum(aligned_size(t.numel() * t.element_size()) for t in returned)
        if self._result_bytes + need > self._capacity_bytes:
            return False
        self._result_bytes += need
        return True

    def add_repeat(self, original: BatchEntry) -> None:
        """Run a case that was just placed a second time, if memory is left."""
        if self._reserve_results(original.call, original.answer):
            self.entries.append(replace(original, variant="again"))

    def add_situation(self, original: BatchEntry, situation: str) -> bool:
        """Place a case again, to be called in another situation.

        Return False where the situation does not apply, ATen rejects it, or memory is full.
        """
        call, answer = original.call, original.answer
        writes = self._op.mutates or facts_of(self._op).undeclared_writes or self._reference is not None
        if situation in (KEPT_RESULTS, REQUIRES_GRAD) and writes:
            return False  # it can run only once on its inputs, and may resize them
        if situation == LAZY_CLONE and writes and any(not row[1] for row in original.input_rows):
            return False  # torch cannot resize lazy clones of empty tensors
        if situation == DEFAULT_DTYPE and self._reference is None:
            call = replace(call, default_dtype=OTHER_DEFAULT_DTYPE)
            if (other := self._answer_if_usable(call)) is None:
                return False
            answer = other
        elif situation == DEFAULT_DTYPE or not self._reserve_results(call, answer):
            return False
        self.entries.append(replace(original, call=call, answer=answer, variant=situation))
        return True

    def add_variant(self, original: BatchEntry, inputs: CallTensors, variant: str) -> bool:
        """Place a hostile variant; False if there is none, ATen rejects it, or memory is full."""
        if variant in _NOT_FOR_USER_REFERENCE and self._reference is not None:
            return False
        tensors = _variant_tensors(VARIANTS[variant], inputs)
        self.tried.counts[variant] += tensors is not None
        if tensors is None or (call := self._call_with_tensors(original, tensors)) is None:
            return False
        if variant in LARGE_VARIANT_NAMES and not (inputs.pointwise or self._results_stay_small(call, tensors)):
            return False
        if variant in LARGE_VARIANT_NAMES and inputs.write_only and not inputs.pointwise:
            after = replace(call, device=torch.device("cpu")).run()  # ATen resizes `out`
            tensors = [
                t.new_full(sized.shape, _OUT_FILL_VALUE) if i in inputs.write_only else t
                for i, (t, sized) in enumerate(zip(tensors, after.inputs, strict=True))
            ]
            if after.raised is not None or (call := self._call_with_tensors(original, tensors)) is None:
                return False
        may_raise = variant in MAY_RAISE and self._device.type == "cpu" and self._reference is None
        if (answer := self._answer_if_usable(call, may_raise=may_raise)) is None:
            return False
        if answer.raised is None and not (
            self._agrees_with_original(variant, original.answer, answer)
            and self._same_in_separate_memory(original, tensors, variant, answer)
        ):
            self.aten_bugs.setdefault(original.case.id, []).append(variant)
            return False
        self.entries.append(
            BatchEntry(original.case, call, list(tensor_rows([call.args, call.kwargs])), answer, variant)
        )
        return True

    def add_large_variant(self, original: BatchEntry, inputs: CallTensors, variant: str) -> None:
        """Place a large variant of a case, if there is one, and record it in ``tried``."""
        if self.add_variant(original, inputs, variant):
            self.tried.dtypes[variant].add(dtypes_of(original))
            if inputs.has_floats:
                self.tried.dims[variant].add(inputs.dim)

    def _results_stay_small(self, call: ReferenceCall, tensors: list[torch.Tensor]) -> bool:
        """Whether results are not much larger than inputs, extrapolated from two small sizes."""
        try:
            small, larger = (self._result_elements(call, tensors, extent) for extent in _SMALL_EXTENTS)
        except Exception:  # noqa: BLE001  # ATen rejects the call at that size: nothing is known
            return False
        longest = max((size for t in tensors for size in t.shape), default=1)
        power = math.log2(max(larger, 1) / max(small, 1))
        max_elements = _MAX_RESULT_GROWTH * sum(t.numel() for t in tensors)
        return bool(max(small, 1) * (longest / _SMALL_EXTENTS[0]) ** power <= max_elements)

    def _result_elements(self, call: ReferenceCall, tensors: list[torch.Tensor], extent: int) -> int:
        """Return the number of elements of ATen's results with long dimensions cut to an extent."""
        cut = (t[tuple(slice(extent if size > _LONG_EXTENT else None) for size in t.shape)].clone() for t in tensors)
        args = decode(call.args, lambda _row: next(cut))
        kwargs = {name: decode(value, lambda _row: next(cut)) for name, value in call.kwargs.items()}
        with torch.no_grad():
            return sum(t.numel() for t in instances(aten_function(call.op)(*args, **kwargs), torch.Tensor))

    def add_argument_variant(self, original: BatchEntry, name: str, value: Any) -> bool:
        """Place a case with another argument value; False if ATen rejects it or memory is full."""
        call = replace(original.call, **_with_argument(self._op, original.call, name, value))
        if (answer := self._answer_if_usable(call)) is None:
            return False
        rows = list(tensor_rows([call.args, call.kwargs]))
        self.entries.append(BatchEntry(original.case, call, rows, answer, f"{ARGUMENT_PREFIX}{name}"))
        return True

    def add_replay(self, original: BatchEntry, inputs: CallTensors, variant: str) -> bool:
        """Place a case with other or reordered contents.

        The worker writes them into the tensors of a first call, and calls again.
        """
        tensors = _variant_tensors(functools.partial(changed_contents, reordered=variant == "reordered"), inputs)
        if tensors is None or (call := self._call_with_tensors(original, tensors)) is None:
            return False
        if (answer := self._answer_if_usable(call)) is None:
            return False
        rows = list(tensor_rows([call.args, call.kwargs]))
        prefill_offsets = tuple(row[0] for row in original.input_rows)
        self.entries.append(BatchEntry(original.case, call, rows, answer, variant, prefill_offsets))
        return True

    def _answer_if_usable(self, call: ReferenceCall, *, may_raise: bool = False) -> CallOutcome | None:
        """Return ATen's answer to a new variant; None when ATen rejects it or memory is full.

        On a GPU, the variant runs on the CPU first. Inputs that would end the GPU's context (an index
        out of range, a probability above one) raise an error there.
        """
        harmless = self._device.type == "cpu" or self._reference is not None
        if not harmless and replace(call, device=torch.device("cpu")).run().raised is not None:
            return None
        answer = call.run_ahead()
        if answer.raised is not None and not may_raise:
            return None
        return answer if self._reserve_results(call, answer) else None

    def variant_inputs(self, entry: BatchEntry) -> CallTensors:
        """Return the tensors of a placed case, to be varied."""
        tensors = tuple(tensor_from_row(self._buffer, row) for row in entry.input_rows)
        written = frozenset(written_tensor_indices(self._op, entry.call))
        pointwise = "pointwise" in self._op.tags
        return CallTensors(
            tensors,
            written,
            written if self._op.kind is SchemaKind.OUT else frozenset(),
            pointwise,
            may_hold_indices=entry.call.may_hold_indices,
            may_hold_counts="dynamic_output_shape" in self._op.tags,
            numbers=tuple(_scalars_in([entry.call.args, entry.call.kwargs])),
            index_tensors=frozenset(self._checked_positions(entry.call)),
            dim=self._dim(entry.call),
            seed=int(entry.case.id[:12], 16),
        )

    def _checked_positions(self, call: ReferenceCall) -> Iterator[int]:
        if facts_of(self._op).checks_indices:
            yield from tensor_indices(self._op, call, {"index", "indices"})

    def _dim(self, call: ReferenceCall) -> int:
        """Return the first dimension that a call names, or -1 for the last."""
        dim = named_arguments(self._op, call).get("dim", -1)
        dim = dim[0] if isinstance(dim, list) and dim else dim
        return dim if isinstance(dim, int) else -1

    def _call_with_tensors(self, original: BatchEntry, tensors: list[torch.Tensor]) -> ReferenceCall | None:
        """Return a copy of a call with other tensors; None when there is no memory for them."""
        need = sum(aligned_size(t.untyped_storage().nbytes()) for t in tensors)
        if self.used_bytes + need > min(len(self._buffer), self._capacity_bytes):
            return None
        rows: list[list[Any]] = []
        rows_by_tensor: dict[tuple[int, str], list[Any]] = {}
        for row, tensor in zip(original.input_rows, tensors, strict=True):
            if (row_of_same := rows_by_tensor.get((id(tensor), row[6]))) is not None:
                rows.append(row_of_same)
                continue
            contents = storage_bytes(tensor)
            start = self.used_bytes
            self._buffer[start : start + len(contents)] = contents
            geometry = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
            rows.append([start, len(contents), row[2], *geometry, row[6]])
            rows_by_tensor[id(tensor), row[6]] = rows[-1]
            self.used_bytes = start + aligned_size(len(contents))
        args, kwargs = replace_tensor_rows([original.call.args, original.call.kwargs], iter(rows))
        return self._call(args, kwargs, original.call.rng_seed)

    def _call(self, args: Any, kwargs: dict[str, Any], seed: int | None) -> ReferenceCall:
        rows = list(tensor_rows([args, kwargs]))
        read = {a.name for a in self._op.arguments if a.type.startswith("Tensor") and not a.writes}
        values = all(row[2][0] in "iu" for row in rows) and not _INDEX_ARGUMENTS & read
        positions = "pointwise" not in self._op.tags and len(rows) > 1 and not values
        if self._reference is not None:
            return UserCall(
                self._op.name, args, kwargs, self._buffer, self._device,
                owns_storage=True, rng_seed=seed, may_hold_indices=positions, reference=self._reference,
            )  # fmt: skip
        owns_storage = self._op.mutates or facts_of(self._op).undeclared_writes or self._device.type != "cpu"
        return ReferenceCall(
            self._op.name, args, kwargs, self._buffer, self._device, owns_storage, seed, may_hold_indices=positions
        )

    def copy_to(self, arena: Bytes) -> None:
        arena[INPUTS_OFFSET : self.used_bytes] = self._buffer[INPUTS_OFFSET : self.used_bytes]

    def changed_inputs(self, arena: Bytes) -> list[list[int]]:
        """Return, for each case, the inputs whose bytes in the arena have changed."""
        if np.array_equal(arena[INPUTS_OFFSET : self.used_bytes], self._buffer[INPUTS_OFFSET : self.used_bytes]):
            return [[] for _ in self.entries]
        return [
            [
                i
                for i, (start, n, *_) in enumerate(p.input_rows)
                if not np.array_equal(arena[start : start + n], self._buffer[start : start + n])
            ]
            for p in self.entries
        ]

    def _write_tensor(self, row: list[Any], seed: str, blob: Bytes | None) -> None:
        stored, nbytes, dtype, shape, strides, offset, device, *bounds = row
        start = self.used_bytes
        spec = TensorSpec(tuple(shape), dtype, tuple(strides), offset, device, stored, nbytes, *bounds)
        write_storage(spec, self._buffer[start : start + nbytes], blob, seed)
        row[0] = start
        del row[7:]
        self.used_bytes = start + aligned_size(nbytes)


def dtypes_of(entry: BatchEntry) -> tuple[str, ...]:
    """Return the dtypes of a case's tensors."""
    return tuple(row[2] for row in entry.input_rows)


def _scalars_in(value: Any) -> Iterator[float]:
    """Yield the numbers among encoded arguments, without those that describe tensors."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield float(value)
    elif isinstance(value, list):
        for item in value:
            yield from _scalars_in(item)
    elif isinstance(value, dict) and "T" not in value:
        for item in value.values():
            yield from _scalars_in(item)


def named_arguments(op: Operator, call: ReferenceCall) -> dict[str, Any]:
    """Return the encoded arguments of a call by name."""
    return dict(zip((a.name for a in op.arguments), call.args, strict=False)) | call.kwargs


def written_tensor_indices(op: Operator, call: ReferenceCall) -> Iterator[int]:
    """Yield the indices of a call's tensors that its operator writes to."""
    return tensor_indices(op, call, {a.name for a in op.arguments if a.writes})


def tensor_indices(op: Operator, call: ReferenceCall, argument_names: AbstractSet[str]) -> Iterator[int]:
    """Yield the indices of a call's tensors that belong to some arguments."""
    names = [*(a.name for a in op.arguments)][: len(call.args)] + list(call.kwargs)
    number = 0
    for name, value in zip(names, [*call.args, *call.kwargs.values()], strict=True):
        count = sum(1 for _ in tensor_rows(value))
        if name in argument_names:
            yield from range(number, number + count)
        number += count


def _variant_tensors(make_variant: MakeVariant, inputs: CallTensors) -> list[torch.Tensor] | None:
    """Return the tensors of a variant; None where torch cannot make them in their dtype."""
    try:
        return make_variant(inputs)
    except RuntimeError as error:
        abort_if_gpu_lost(error)
        return None


def _with_argument(op: Operator, call: ReferenceCall, name: str, value: Any) -> dict[str, Any]:
    """Return a call's arguments with another value for one of them, by position where possible."""
    position = [a.name for a in op.arguments].index(name)
    if name not in call.kwargs and position < len(call.args):
        return {"args": [*call.args[:position], value, *call.args[position + 1 :]], "kwargs": call.kwargs}
    if name not in call.kwargs and position == len(call.args) and not op.arguments[position].kwarg_only:
        return {"args": [*call.args, value], "kwargs": call.kwargs}
    return {"args": call.args, "kwargs": {**call.kwargs, name: value}}
