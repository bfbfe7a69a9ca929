"""Words for the values of arguments, as written in proofs. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

DEFAULT = "default"
"""Word for an argument that is left out."""
ValueRanges = Mapping[str, Sequence[float]]
"""Allowed values of a non-tensor argument.

Maps words for values to the minimum and maximum of the numbers in them, if any.
"""
AllowedValues = Mapping[str, ValueRanges]
"""Allowed values of all non-tensor arguments, by name."""
CollectedValues = dict[str, dict[str, list[float]]]
"""``Allowed`` while values are collected."""
TorchNamer = Callable[[Any], str]
"""Returns the name of a torch value, such as a dtype.

The name is empty for values that are not part of a proof, such as a device.
"""
NumberLimits = tuple[Sequence[int], Sequence[float]]
"""Integers and floats at which it may change whether a number is allowed, both ascending."""
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_MIN_LONG_LIST_LENGTH = 3
"""Lists of at least this length count as one length."""
_FLOAT_KIND = "float"


def number_kind(value: object) -> str:
    """Return the word for a plain number in place of a tensor.

    It includes the number's type, because the result depends on that.
    """
    return f"number({type(value).__name__})"


def list_kind(words: Sequence[str]) -> str:
    """Return the word for a list: its distinct items, and its length as 1, 2 or ``n``."""
    if not words:
        return "[]"
    return f"[{' '.join(dict.fromkeys(words))}]*{len(words) if len(words) < _MIN_LONG_LIST_LENGTH else 'n'}"


def dtype_signature(given: Iterable[Any], dtype_name: TorchNamer) -> str:
    """Return the dtypes of a call's tensors as text: ``float32,int64``.

    A list is ``[float32]*2``, and None is empty.
    """
    return ",".join(_dtype_kind(value, dtype_name) for value in given)


def _dtype_kind(value: Any, dtype_name: TorchNamer) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return list_kind([_dtype_kind(item, dtype_name) for item in value])
    dtype = getattr(value, "dtype", None)
    return number_kind(value) if dtype is None else dtype_name(dtype)


def value_kind(value: Any, torch_name: TorchNamer) -> tuple[str, list[float]]:
    """Return the word for a non-tensor value, and its numbers, which the word leaves out."""
    if isinstance(value, bool | complex) or value is None:
        return str(value), []
    if isinstance(value, str):
        return ascii(value), []
    if isinstance(value, int):
        return "int", [value]
    if isinstance(value, float):
        is_ordinary = math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0)
        return (_FLOAT_KIND, [value]) if is_ordinary else (str(value), [])
    if isinstance(value, list | tuple):
        items = [value_kind(item, torch_name) for item in value]
        words, numbers = [word for word, _ in items], [n for _, item_numbers in items for n in item_numbers]
        return list_kind(words) if numbers else f"[{' '.join(words)}]", numbers
    return torch_name(value), []


def add_value(known: CollectedValues, name: str, kind: str, numbers: Iterable[float]) -> None:
    """Add a word for an argument's value, and extend the word's range by the numbers in it."""
    words = known.setdefault(name, {})
    values = [*words.get(kind, ()), *numbers]
    words[kind] = [min(values), max(values)] if values else []


def number_limits(known: Iterable[ValueRanges], default: Any) -> NumberLimits:
    """Return the limits of a number, given what is known of it in several places.

    For two numbers of one type between the same limits, ``is_in_ranges`` has the same answer, if both are finite and
    neither is the default or -0.0. A limit belongs to the numbers above it.
    """
    integers: set[int] = set()
    floats: set[float] = set()
    for ranges in known:
        if bounds := ranges.get("int"):
            integers |= {math.ceil(bounds[0]), math.floor(bounds[1]) + 1}
        if (bounds := ranges.get(_FLOAT_KIND)) and not _allows_any_float(ranges, bounds, default):
            floats |= {bounds[0], math.nextafter(bounds[1], math.inf)}
    return sorted(n for n in integers if _INT64_MIN < n <= _INT64_MAX), sorted(floats)


def is_in_ranges(ranges: ValueRanges, kind: str, numbers: Sequence[float], default: Any) -> bool:
    """Whether a value of an argument is within the known ones.

    Integers must lie within the known range. Any float is accepted if several are known.
    ``default`` is one of them if the argument has been left out.
    """
    bounds = ranges.get(kind)
    if bounds is None or not numbers:
        return bounds is not None
    if not bounds:
        return False
    low, high = bounds
    if kind == _FLOAT_KIND and _allows_any_float(ranges, bounds, default):
        return True
    if low < high and kind.startswith(f"[{_FLOAT_KIND}]*"):
        return True
    return all(low <= n <= high for n in numbers)


def _allows_any_float(ranges: ValueRanges, bounds: Sequence[float], default: Any) -> bool:
    """Whether several floats are known: two bounds that differ, or one and the default."""
    low, high = bounds
    return low < high or (DEFAULT in ranges and isinstance(default, int | float) and default != low)
