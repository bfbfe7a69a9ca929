"""One operator overload and the facts of its schema."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEVICES = frozenset({"cpu", "cuda"})
"""Devices for which kernels are looked up."""


class SchemaKind(enum.StrEnum):
    """How an operator returns its result."""

    FUNCTIONAL = "functional"
    INPLACE = "inplace"
    OUT = "out"
    MUTABLE = "mutable"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument or a result of a schema."""

    name: str
    type: str
    default: str | None
    kwarg_only: bool
    alias: str | None
    """The alias set, as in ``Tensor(a)``; None for a fresh value."""
    writes: bool
    """Whether the operator writes to it, as in ``Tensor(a!)``."""

    @property
    def required(self) -> bool:
        """Whether a call must pass it."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class Operator:
    """One overload of an ATen operator, for example ``add.Tensor``."""

    base: str
    overload: str
    schema: str
    kind: SchemaKind
    family: str
    """The name of the family's first member in the order functional, in-place, out, mutable."""
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    composite: bool
    """CompositeImplicitAutograd: composed of other operators, whose gradients autograd uses."""
    tags: frozenset[str]
    devices: frozenset[str] = DEVICES
    """Devices for which ATen has a kernel, its own or a composite."""

    @property
    def name(self) -> str:
        return f"{self.base}.{self.overload}"

    @property
    def reference_name(self) -> str:
        """Source of the expected results, as named in verdicts."""
        return "ATen"

    @property
    def packet(self) -> str:
        """The base name without the underscore of an in-place operator."""
        return packet_of(self.base, self.kind)

    @property
    def is_random(self) -> bool:
        return "nondeterministic_seeded" in self.tags

    @property
    def mutates(self) -> bool:
        return any(argument.writes for argument in self.arguments)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the operator's input arguments: all but ``out`` ones."""
        return tuple(a.name for a in self.arguments if not (self.kind is SchemaKind.OUT and a.writes))

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without omitted defaults."""
        return {**{a.name: v for a, v in zip(self.arguments, args, strict=False)}, **kwargs}

    def as_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "overload": self.overload,
            "schema": self.schema,
            "form": self.kind.value,
            "family": self.family,
            "arguments": [_argument_row(a) for a in self.arguments],
            "returns": [_argument_row(a) for a in self.returns],
            "composite": self.composite,
            "tags": sorted(self.tags),
            "devices": sorted(self.devices),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Operator:
        return cls(
            base=row["base"],
            overload=row["overload"],
            schema=row["schema"],
            kind=SchemaKind(row["form"]),
            family=row["family"],
            arguments=tuple(Argument(*a) for a in row["arguments"]),
            returns=tuple(Argument(*a) for a in row["returns"]),
            composite=row["composite"],
            tags=frozenset(row["tags"]),
            devices=frozenset(row["devices"]),
        )


def packet_of(base: str, kind: str) -> str:
    """Return the packet's name: the base name, without the underscore of an in-place operator."""
    return base[:-1] if kind == SchemaKind.INPLACE and base.endswith("_") else base


def _argument_row(a: Argument) -> list[Any]:
    return [a.name, a.type, a.default, a.kwarg_only, a.alias, a.writes]
