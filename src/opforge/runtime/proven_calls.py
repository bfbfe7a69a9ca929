"""The calls that a kernel is proven for, and a check whether a call is one of them.

A proof has a row for each combination of dtypes of a call's tensors. The row limits their ranks,
numbers of elements, extents and layouts, and the values of the other arguments. It also lists the
numbers of elements at which the kernel was timed, and whether it was not slower than ATen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .layouts import OFFSET, SHAPES_DIFFER, layout_names
from .operator_schema import Argument, OperatorSchema
from .trees import leaves
from .value_ranges import DEFAULT, AllowedValues, ValueRanges, dtype_signature, is_in_ranges, value_kind

UNPROVEN_DTYPES = "dtypes not proven"
UNPROVEN_LAYOUT = "layout not proven"
UNPROVEN_SHAPES = "shapes that differ not proven"
UNPROVEN_DEVICES = "more than one device"
UNPROVEN_RANK = "number of dimensions not proven"
UNPROVEN_SIZE = "size not proven"
UNPROVEN_EXTENT = "extent not proven"
UNPROVEN_SPAN = "steps too long for 32 bits not proven"
UNPROVEN_ARGUMENT = "{} not proven for this value"
NOT_TIMED = "not timed at this size"
SLOWER = "slower than ATen at this size"
_DEFAULT_ONLY: ValueRanges = {DEFAULT: ()}
_NO_VALUES: ValueRanges = {}
Extents = tuple[tuple[int, int], ...]
"""Minimum and maximum extent of each dimension, last dimension first."""
_MAX_SPAN_ELEMENTS = (1 << 31) - 1
"""Largest distance in elements from a tensor's first to its last that fits in 32 bits.

Gaps can take a tensor of few elements beyond it.
"""
_ALIGNMENT_BYTES = 16
"""Bytes of one vector load on a GPU or CPU. Allocators align memory to at least this."""


@dataclass(frozen=True, slots=True)
class ProofRow:
    """The proven calls for one signature of dtypes."""

    rank: tuple[int, int]
    numel: tuple[int, int]
    """Range for the largest tensor of a call."""
    extents: tuple[Extents, ...]
    """One entry for each tensor argument; the entry of a list covers all its tensors."""
    layouts: frozenset[str]
    timed: tuple[tuple[int, int, bool], ...] = ()
    """Ranges of element counts, ascending, with whether the kernel is not slower there."""
    arguments: AllowedValues = field(default_factory=dict)
    """Allowed values of non-tensor arguments. Arguments not listed may only be left out."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ProofRow:
        timed = tuple((int(low), int(high), bool(good)) for low, high, good in row.get("timed", ()))
        (min_rank, max_rank), (low, high) = row["rank"], row["numel"]
        return cls(
            (int(min_rank), int(max_rank)),
            (int(low), int(high)),
            tuple(tuple((int(a), int(b)) for a, b in ranges) for ranges in row["extents"]),
            frozenset(row["layouts"]),
            timed,
            row.get("arguments", {}),
        )

    def covers_extents(self, given: Sequence[Any]) -> bool:
        """Whether each dimension of each tensor argument is within the range of judged sizes."""
        return len(given) == len(self.extents) and all(
            _within(tensor.shape, ranges)
            for value, ranges in zip(given, self.extents, strict=True)
            for tensor in _tensors([value])
        )

    def reject_by_speed(self, numel: int) -> str:
        """Return why speed rules out a call of this size; empty if it does not."""
        for low, high, good in self.timed:
            if low <= numel <= high:
                return "" if good else SLOWER
        return NOT_TIMED

    @property
    def serves_any(self) -> bool:
        """Whether the kernel is not slower than ATen at any proven size."""
        low, high = self.numel
        return any(good and max(low, timed_low) <= min(high, timed_high) for timed_low, timed_high, good in self.timed)


class ProvenCalls:
    """The calls of one operator that a kernel is proven for.

    With ``check_speed``, only those where it is not slower than ATen.
    """

    def __init__(self, op: OperatorSchema, rows: Mapping[str, Mapping[str, Any]], *, check_speed: bool) -> None:
        self._tensor_arguments = [(i, a.name) for i, a in enumerate(op.arguments) if "Tensor" in a.type]
        self._other_arguments = [(i, a) for i, a in enumerate(op.arguments) if "Tensor" not in a.type]
        self._check_speed = check_speed
        self.rows = {signature: ProofRow.from_row(row) for signature, row in rows.items()}

    @property
    def serves_any(self) -> bool:
        """Whether any call is inside the domain."""
        return not self._check_speed or any(p.serves_any for p in self.rows.values())

    def why_not(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Say why a call is outside the domain; empty if it is inside."""
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in self._tensor_arguments]
        return self.reject_tensors(given) or self.reject_arguments(self.allowed_values(given), given, args, kwargs)

    def reject_tensors(self, given: Sequence[Any]) -> str:
        """Say why no call with these tensors is inside; empty if some may be.

        ``given`` holds the values of all tensor arguments, in order.
        """
        proven = self.rows.get(dtype_signature(given, _name))
        if proven is None:
            return UNPROVEN_DTYPES
        tensors = list(_tensors(given))
        numel = max((t.numel() for t in tensors), default=0)
        if len({t.device for t in tensors}) > 1:
            return UNPROVEN_DEVICES
        if not all(proven.rank[0] <= t.dim() <= proven.rank[1] for t in tensors):
            return UNPROVEN_RANK
        if not proven.numel[0] <= numel <= proven.numel[1]:
            return UNPROVEN_SIZE
        if not proven.covers_extents(given):
            return UNPROVEN_EXTENT
        if any(_span_elements(t) > max(_MAX_SPAN_ELEMENTS, proven.numel[1]) for t in tensors):
            return UNPROVEN_SPAN
        if not all(layouts_of(t) <= proven.layouts and not t.is_conj() and not t.is_neg() for t in tensors):
            return UNPROVEN_LAYOUT
        if SHAPES_DIFFER not in proven.layouts and any(t.shape != tensors[0].shape for t in tensors[1:]):
            return UNPROVEN_SHAPES
        return proven.reject_by_speed(numel) if self._check_speed else ""

    def allowed_values(self, given: Sequence[Any]) -> AllowedValues:
        """Return the allowed values of non-tensor arguments, for tensors of these dtypes."""
        proven = self.rows.get(dtype_signature(given, _name))
        return {} if proven is None else proven.arguments

    def reject_arguments(
        self, allowed: AllowedValues, given: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Say which non-tensor argument has a value that is not allowed; empty if none has."""
        for i, argument in self._other_arguments:
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default)
            if isinstance(value, torch.device):
                if any(t.device != value for t in _tensors(given)):
                    return UNPROVEN_DEVICES
                continue
            words = allowed.get(argument.name, _NO_VALUES if argument.required else _DEFAULT_ONLY)
            if not _is_allowed(words, value, argument.default):
                return UNPROVEN_ARGUMENT.format(argument.name)
        return ""

    def number_ranges(self, argument: Argument) -> list[ValueRanges]:
        """Return what is known of an argument that is a number, for all dtypes."""
        return [row.arguments.get(argument.name, _NO_VALUES) for row in self.rows.values()]

    def any_offset(self, given: Sequence[Any]) -> bool:
        """Whether the storage offset makes no difference for tensors of these dtypes."""
        proven = self.rows.get(dtype_signature(given, _name))
        return proven is None or OFFSET in proven.layouts


def _within(shape: Sequence[int], ranges: Extents) -> bool:
    return len(shape) <= len(ranges) and all(
        low <= size <= high for size, (low, high) in zip(reversed(shape), ranges, strict=False)
    )


def _is_allowed(words: ValueRanges, value: Any, default: Any) -> bool:
    """Whether an argument may have this value."""
    if DEFAULT in words and value == default and repr(value) == repr(default):  # 1.0 is not 1, and -0.0 is not 0.0
        return True
    word, numbers = value_kind(value, _name)
    return is_in_ranges(words, word, numbers, default)


def _name(value: Any) -> str:
    """Return the name of a torch value, as in cases. Cases never hold a generator."""
    return str(value).removeprefix("torch.")


def _tensors(given: Sequence[Any]) -> Iterable[Any]:
    return (value for value in leaves(given) if hasattr(value, "dtype"))


def _span_elements(tensor: Any) -> int:
    """Return the distance in elements from a tensor's first to its last, gaps included."""
    return sum(int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def layouts_of(tensor: Any) -> frozenset[str]:
    """Return the memory layouts of a tensor."""
    names = layout_names(tuple(tensor.shape), tuple(tensor.stride()))
    return names | {OFFSET} if has_offset(tensor) else names


def has_offset(tensor: Any) -> bool:
    """Whether a tensor begins at a storage offset, or where no allocator would begin.

    Its memory may come from elsewhere, such as NumPy.
    """
    return bool(tensor.storage_offset() or tensor.data_ptr() % _ALIGNMENT_BYTES)
