"""Alternative values for arguments, and which arguments with a default affect a result's values."""

from __future__ import annotations

from typing import Any

from opforge.ops.operator import Argument

_STORAGE_ARGUMENTS = frozenset({"layout", "device", "pin_memory", "generator", "memory_format", "non_blocking"})
"""Arguments that affect how or where a result is stored, but not its values."""
_VALUES_BY_TYPE: dict[str, list[Any]] = {
    "int": [0, 1, 2],
    "SymInt": [0, 1, 2],
    "float": [0.5, 2.0, 0.0],
    "Scalar": [2, 0.5, 0],
}
_INEXACT_FRACTION = 0.1
"""A value that differs between float32 and float64."""
_WINDOW_ARGUMENTS = frozenset({"stride", "padding", "dilation"})
_CORRECTION_ABOVE_ANY_COUNT = 10_000


def is_omittable(argument: Argument) -> bool:
    """Whether an argument has a default and affects the result's values."""
    return argument.default is not None and argument.name not in _STORAGE_ARGUMENTS and not argument.writes


def other_values(argument: Argument) -> list[Any]:
    """Return alternatives to an argument's default, as values of a JSON tree."""
    base_type = argument.type.removesuffix("?")
    if argument.name == "correction":
        return [0, 2, _CORRECTION_ABOVE_ANY_COUNT]
    if base_type == "bool":
        return [argument.default != "True", argument.default == "True"]
    if base_type.startswith("ScalarType"):
        return [{"dtype": "f64"}]
    if "[" in base_type:
        count = int(base_type.partition("[")[2].rstrip("]") or 1)
        return [[n] * count for n in ((0.5, 2.0) if base_type.startswith("float") else (0, 1, 2))]
    return _VALUES_BY_TYPE.get(base_type, [])


def other_required_values(argument: Argument, given: Any) -> list[Any]:
    """Return alternatives to the given value of an argument without a default."""
    if argument.type in ("Scalar", "float"):
        return [_INEXACT_FRACTION] if isinstance(given, int | float) and not isinstance(given, bool) else []
    if argument.name in _WINDOW_ARGUMENTS and isinstance(given, list) and len(given) > 1:
        return [[1 + i % 2 for i in range(len(given))]]
    return []
