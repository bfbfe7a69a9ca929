"""Arguments with a default: which of them say what a result is, and what else they may be."""

from __future__ import annotations

from typing import Any

from opforge.ops.operator import Argument

_NOT_NUMBERS = frozenset({"layout", "device", "pin_memory", "generator", "memory_format", "non_blocking"})
"""Arguments that say where or how a result is kept, not what it is."""
_OF_TYPE: dict[str, list[Any]] = {
    "int": [0, 1, 2],
    "SymInt": [0, 1, 2],
    "float": [0.5, 2.0, 0.0],
    "Scalar": [2, 0.5, 0],
}
_NO_BINARY_FRACTION = 0.1
"""Another number in float32 than in float64."""
_WINDOW = frozenset({"stride", "padding", "dilation"})
_BEYOND_ANY_COUNT = 10_000


def may_be_left_out(argument: Argument) -> bool:
    """Whether an argument has a default and says what the result is."""
    return argument.default is not None and argument.name not in _NOT_NUMBERS and not argument.writes


def other_values(argument: Argument) -> list[Any]:
    """Return values that an argument may have instead of its default, as they stand in a JSON tree."""
    plain = argument.type.removesuffix("?")
    if argument.name == "correction":
        return [0, 2, _BEYOND_ANY_COUNT]
    if plain == "bool":
        return [argument.default != "True", argument.default == "True"]
    if plain.startswith("ScalarType"):
        return [{"dtype": "f64"}]
    if "[" in plain:
        count = int(plain.partition("[")[2].rstrip("]") or 1)
        return [[n] * count for n in ((0.5, 2.0) if plain.startswith("float") else (0, 1, 2))]
    return _OF_TYPE.get(plain, [])


def other_required_values(argument: Argument, given: Any) -> list[Any]:
    """Return values that an argument without a default may have instead of the one that it has."""
    if argument.type in ("Scalar", "float"):
        return [_NO_BINARY_FRACTION] if isinstance(given, int | float) and not isinstance(given, bool) else []
    if argument.name in _WINDOW and isinstance(given, list) and len(given) > 1:
        return [[1 + i % 2 for i in range(len(given))]]
    return []
