"""What stands in a proof for the arguments of a call, in words. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

DEFAULT = "default"
"""For an argument that is left out."""
Words = Mapping[str, Sequence[float]]
"""What an argument that is no tensor may be: words for values, with the least and the greatest number where there are any."""
Allowed = Mapping[str, Words]
"""The same of all such arguments, by name."""
Arguments = dict[str, dict[str, list[float]]]
"""The same, while it is gathered."""
Naming = Callable[[Any], str]
"""Returns the name of a value that is torch's own, such as a dtype; nothing for one that is no part of a proof, such as a device."""
_MANY = 3
"""From how many values on lists are one to a kernel."""
_FLOAT = "float"


def number_word(value: object) -> str:
    """Return what stands in a signature for a plain number where the schema has a tensor: what comes out depends on its kind."""
    return f"number({type(value).__name__})"


def list_word(words: Sequence[str]) -> str:
    """Return what stands for a list: what is in it, and how many as far as one, two and more are told apart."""
    if not words:
        return "[]"
    return f"[{' '.join(dict.fromkeys(words))}]*{len(words) if len(words) < _MANY else 'n'}"


def argument_word(value: Any, naming: Naming) -> tuple[str, list[float]]:
    """Return a word for the value of an argument that is no tensor, and the numbers in it, which are no part of the word."""
    if isinstance(value, bool | complex) or value is None:
        return str(value), []
    if isinstance(value, str):
        return ascii(value), []
    if isinstance(value, int):
        return "int", [value]
    if isinstance(value, float):
        usual = math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0)
        return (_FLOAT, [value]) if usual else (str(value), [])
    if isinstance(value, list | tuple):
        found = [argument_word(one, naming) for one in value]
        words, numbers = [word for word, _ in found], [n for _, those in found for n in those]
        return list_word(words) if numbers else f"[{' '.join(words)}]", numbers
    return naming(value), []


def add_argument(known: Arguments, name: str, word: str, numbers: Iterable[float]) -> None:
    """Add a word for the value of an argument to what is known, with numbers in it."""
    words = known.setdefault(name, {})
    seen = [*words.get(word, ()), *numbers]
    words[word] = [min(seen), max(seen)] if seen else []


def holds(words: Words, word: str, numbers: Sequence[float], default: Any) -> bool:
    """Whether a value is among those that are known of an argument: whole numbers lie between them; of others any, where several are known.

    ``default`` is what it was where it was left out.
    """
    bounds = words.get(word)
    if bounds is None or not numbers:
        return bounds is not None
    if not bounds:
        return False
    low, high = bounds
    if word == _FLOAT and DEFAULT in words and isinstance(default, int | float) and default != low:
        return True
    if low < high and (word == _FLOAT or word.startswith(f"[{_FLOAT}]*")):
        return True
    return all(low <= n <= high for n in numbers)
