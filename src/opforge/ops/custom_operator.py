"""Operators that are not in ATen, known only from their cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from opforge.ops.operator import Argument, Operator, SchemaKind

_NAMESPACE = "custom::"
"""Prefix of a custom operator's base name, so rules for ATen's operators never apply to it."""


@dataclass(frozen=True, slots=True)
class CustomOperator(Operator):
    """A user's own operator; its full name is the user's name, without an overload."""

    @property
    def name(self) -> str:
        return self.base.removeprefix(_NAMESPACE)

    @property
    def reference_name(self) -> str:
        return "the reference"

    @classmethod
    def create(cls, name: str, positional: int = 0, named: Iterable[str] = ()) -> CustomOperator:
        """Return an operator with at most ``positional`` positional arguments and these names."""
        arguments = [_argument(f"args[{i}]") for i in range(positional)]
        arguments += [replace(_argument(n), kwarg_only=True) for n in named]
        base = f"{_NAMESPACE}{name}"
        return cls(
            base,
            "",
            f"{name}(...)",
            SchemaKind.FUNCTIONAL,
            base,
            tuple(arguments),
            (),
            composite=False,
            tags=frozenset(),
        )

    def as_random(self) -> CustomOperator:
        """Return the operator marked as random."""
        return replace(self, tags=frozenset({"nondeterministic_seeded"}))


def _argument(name: str) -> Argument:
    return Argument(name, "Any", default=None, kwarg_only=False, alias=None, writes=False)
