"""Operators that are not in ATen: what their cases show of them is all that is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from opforge.ops.operator import Argument, Form, Operator

_NAMESPACE = "custom::"
"""Before a custom operator's base name, so that a rule of ATen's operator of that name never applies to it."""


@dataclass(frozen=True, slots=True)
class CustomOperator(Operator):
    """An operator of the user's own; its full name is the one that the user gave it, without an overload."""

    @property
    def name(self) -> str:
        return self.base.removeprefix(_NAMESPACE)

    @property
    def authority(self) -> str:
        return "the reference"

    @classmethod
    def of(cls, name: str, positional: int = 0, named: Iterable[str] = ()) -> CustomOperator:
        """Return an operator whose calls have so many arguments by position, at most, and these by name."""
        given = [_argument(f"args[{i}]") for i in range(positional)]
        given += [replace(_argument(n), kwarg_only=True) for n in named]
        base = f"{_NAMESPACE}{name}"
        return cls(base, "", f"{name}(...)", Form.FUNCTIONAL, base, tuple(given), (), composite=False, tags=frozenset())

    def drawing(self) -> CustomOperator:
        """Return the operator as one whose results are drawn at random."""
        return replace(self, tags=frozenset({"nondeterministic_seeded"}))


def _argument(name: str) -> Argument:
    return Argument(name, "Any", default=None, kwarg_only=False, alias=None, writes=False)
