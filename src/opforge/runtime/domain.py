"""For which calls a kernel is proven, and whether a call is one of them.

A proof says it by the dtypes of all tensors of a call: how many dimensions and elements they may have, in which layouts they may be, and at which numbers of
elements the kernel was timed and found not slower than ATen. What was found is remembered by the geometry of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .facts import Signature, leading_tensors
from .layouts import CONTIGUOUS, NUMBER, OFFSET, layout
from .originals import NUMBERS
from .shortest import GUARDED, MOST_KNOWN, Check, Quick, geometry

Ask = Callable[[tuple[Any, ...], Mapping[str, Any]], str]
"""Returns why a call is outside; nothing where it is inside."""
UNPROVEN_DTYPES = "dtypes not proven"
UNPROVEN_LAYOUT = "layout not proven"
UNPROVEN_RANK = "number of dimensions not proven"
UNPROVEN_SIZE = "size not proven"
NOT_TIMED = "not timed at this size"
SLOWER = "slower than ATen at this size"


@dataclass(frozen=True, slots=True)
class Proven:
    """What is proven for one signature of dtypes."""

    rank: tuple[int, int]
    numel: tuple[int, int]
    """Of the largest tensor of a call."""
    layouts: frozenset[str]
    timed: tuple[tuple[int, int, bool], ...] = ()
    """Ranges of numbers of elements with whether the kernel is not slower there, ascending."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Proven:
        timed = tuple((int(low), int(high), bool(good)) for low, high, good in row.get("timed", ()))
        (least, most), (low, high) = row["rank"], row["numel"]
        return cls((int(least), int(most)), (int(low), int(high)), frozenset(row["layouts"]), timed)

    def speed(self, numel: int) -> str:
        """Return why a call of this size is not served for its speed; nothing where it is."""
        for low, high, good in self.timed:
            if low <= numel <= high:
                return "" if good else SLOWER
        return NOT_TIMED


class Domain:
    """For which calls of one operator a kernel is proven; with ``speed``, only those where it is not slower."""

    def __init__(self, op: Signature, rows: Mapping[str, Mapping[str, Any]], *, speed: bool) -> None:
        self._named = [a.name for a in op.arguments if "Tensor" in a.type]
        self._at = [i for i, a in enumerate(op.arguments) if "Tensor" in a.type]
        self._last = self._at[-1] if self._at else len(op.arguments)
        self._leading = leading_tensors(op)
        self._speed = speed
        self.proven = {signature: Proven.of(row) for signature, row in rows.items()}
        self._anywhere = all(OFFSET in p.layouts for p in self.proven.values())
        self._known: dict[Any, list[tuple[list[Check], str]]] = {}
        """What was found for calls, by size and geometry."""
        self._room = MOST_KNOWN if GUARDED and self._at else 0

    @property
    def serves_any(self) -> bool:
        """Whether there are calls that are inside."""
        return not self._speed or any(low <= high for low, high in map(self._sizes, self.proven.values()))

    def ask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Say why a call is outside; nothing where it is inside."""
        if len(args) <= self._last or not isinstance(args[self._at[0]], torch.Tensor):
            return self._find_out(args, kwargs)
        tensors = [args[i] for i in self._at]
        size = tensors[0].numel()
        begins = () if self._anywhere else (isinstance(t, torch.Tensor) and t.storage_offset() > 0 for t in tensors)
        key = (size, *begins)
        for checks, reason in self._known.get(key, ()):
            if all(check(tensor) for check, tensor in zip(checks, tensors, strict=True)):
                return reason
        reason = self._find_out(args, kwargs)
        if self._room and all(isinstance(t, (torch.Tensor, *NUMBERS)) for t in tensors):
            self._room -= 1
            known = [geometry(t) if isinstance(t, torch.Tensor) else _is_number for t in tensors]
            self._known.setdefault(key, []).append((known, reason))
        return reason

    def _find_out(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in zip(self._at, self._named, strict=True)]
        proven = self.proven.get(signature_of(given))
        if proven is None:
            return UNPROVEN_DTYPES
        tensors = list(_tensors(given))
        numel = max((t.numel() for t in tensors), default=0)
        if not all(proven.rank[0] <= t.dim() <= proven.rank[1] for t in tensors):
            return UNPROVEN_RANK
        if not proven.numel[0] <= numel <= proven.numel[1]:
            return UNPROVEN_SIZE
        if not all(layouts_of(t) <= proven.layouts for t in tensors):
            return UNPROVEN_LAYOUT
        return proven.speed(numel) if self._speed else ""

    def quick(self) -> Quick | None:
        """Return what says at once of many calls that they are inside, if there is such a thing for this operator.

        It knows plain contiguous tensors that begin their memory and want no gradients; what it does not know may be inside all the same.
        """
        fit = {s: p for s, p in self.proven.items() if CONTIGUOUS in p.layouts and _all_plain(s)}
        plain = {tuple(map(_dtype_named, s.split(","))): (*p.rank, *self._sizes(p)) for s, p in fit.items()}
        if not plain or self._leading not in (1, 2):
            return None
        inside = _inside_one({d[0]: r for d, r in plain.items()}) if self._leading == 1 else _inside_two(plain)
        return Quick(inside, lasting=all(OFFSET in p.layouts for p in fit.values()))

    def _sizes(self, proven: Proven) -> tuple[int, int]:
        """Return one range of sizes that is inside; where there are several, the largest."""
        low, high = max(proven.numel[0], 1), proven.numel[1]
        if not self._speed:
            return low, high
        good = [(max(low, at), min(high, to)) for at, to, fine in proven.timed if fine]
        return max((r for r in good if r[0] <= r[1]), key=lambda r: r[1] - r[0], default=(1, 0))


def _inside_one(proven: Mapping[torch.dtype, Any]) -> Check:
    find, nowhere = proven.get, (0, -1, 0, -1)

    def inside(one: Any) -> bool:
        least, most, low, high = find(one.dtype, nowhere)
        return (
            low <= one.numel() <= high
            and least <= one.dim() <= most
            and one.is_contiguous()
            and not one.storage_offset()
            and not one.requires_grad
        )

    return inside


def _inside_two(proven: Mapping[tuple[torch.dtype, ...], Any]) -> Check:
    find, nowhere = proven.get, (0, -1, 0, -1)

    def inside(one: Any, other: Any) -> bool:
        if other.__class__ is not torch.Tensor:
            return False
        least, most, low, high = find((one.dtype, other.dtype), nowhere)
        return (
            low <= one.numel() <= high
            and low <= other.numel() <= high
            and least <= one.dim() <= most
            and least <= other.dim() <= most
            and one.is_contiguous()
            and other.is_contiguous()
            and not (one.storage_offset() or other.storage_offset() or one.requires_grad or other.requires_grad)
        )

    return inside


def _is_number(value: Any) -> bool:
    return value.__class__ in NUMBERS


def _all_plain(signature: str) -> bool:
    return bool(signature) and all(part and part != NUMBER and "[" not in part for part in signature.split(","))


def _dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def signature_of(given: Iterable[Any]) -> str:
    """Return the dtypes of a call's tensors as text: ``float32,int64``; a list in brackets, nothing for None."""
    return ",".join(_word(value) for value in given)


def _word(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "[" + " ".join(dict.fromkeys(map(_word, value))) + "]"
    dtype = getattr(value, "dtype", None)
    return NUMBER if dtype is None else str(dtype).removeprefix("torch.")


def _tensors(given: Iterable[Any]) -> Iterable[Any]:
    for value in given:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "dtype"):
            yield value


def layouts_of(tensor: Any) -> frozenset[str]:
    """Return how the elements of a tensor lie in memory."""
    found = layout(tuple(tensor.shape), tuple(tensor.stride()))
    return frozenset({found, OFFSET} if tensor.storage_offset() else {found})
