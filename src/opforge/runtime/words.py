"""Words for the values of arguments, as written in proofs. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

DEFAULT = "default"
"""Word for an argument that is left out."""
Words = Mapping[str, Sequence[float]]
"""Allowed values of a non-tensor argument.

Maps words for values to the minimum and maximum of the numbers in them, if any.
"""
Allowed = Mapping[str, Words]
"""Allowed values of all non-tensor arguments, by name."""
Arguments = dict[str, dict[str, list[float]]]
"""``Allowed`` while values are collected."""
Naming = Callable[[Any], str]
"""Returns the name of a torch value, such as a dtype.

The name is empty for values that are not part of a proof, such as a device.
"""
_MANY = 3
"""Lists of at least this length count as one length."""
_FLOAT_WORD = "float"


def number_word(value: object) -> str:
    """Return the word for a plain number in place of a tensor.

    It includes the number's type, because the result depends on that.
    """
    return f"number({type(value).__name__})"


def list_word(words: Sequence[str]) -> str:
    """Return the word for a list: its distinct items, and its length as 1, 2 or ``n``."""
    if not words:
        return "[]"
    return f"[{' '.join(dict.fromkeys(words))}]*{len(words) if len(words) < _MANY else 'n'}"


def argument_word(value: Any, naming: Naming) -> tuple[str, list[float]]:
    """Return the word for a non-tensor value, and its numbers, which the word leaves out."""
    if isinstance(value, bool | complex) or value is None:
        return str(value), []
    if isinstance(value, str):
        return ascii(value), []
    if isinstance(value, int):
        return "int", [value]
    if isinstance(value, float):
        is_ordinary = math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0)
        return (_FLOAT_WORD, [value]) if is_ordinary else (str(value), [])
    if isinstance(value, list | tuple):
        items = [argument_word(item, naming) for item in value]
        words, numbers = [word for word, _ in items], [n for _, item_numbers in items for n in item_numbers]
        return list_word(words) if numbers else f"[{' '.join(words)}]", numbers
    return naming(value), []


def add_argument(known: Arguments, name: str, word: str, numbers: Iterable[float]) -> None:
    """Add a word for an argument's value, and extend the word's range by the numbers in it."""
    words = known.setdefault(name, {})
    values = [*words.get(word, ()), *numbers]
    words[word] = [min(values), max(values)] if values else []


def holds(words: Words, word: str, numbers: Sequence[float], default: Any) -> bool:
    """Whether a value of an argument is within the known ones.

    Integers must lie within the known range. Any float is accepted if several are known.
    ``default`` is one of them if the argument has been left out.
    """
    bounds = words.get(word)
    if bounds is None or not numbers:
        return bounds is not None
    if not bounds:
        return False
    low, high = bounds
    if word == _FLOAT_WORD and DEFAULT in words and isinstance(default, int | float) and default != low:
        return True
    if low < high and (word == _FLOAT_WORD or word.startswith(f"[{_FLOAT_WORD}]*")):
        return True
    return all(low <= n <= high for n in numbers)
