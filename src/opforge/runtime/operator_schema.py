"""Torch's own facts about an operator: its form, its arguments, its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FUNCTIONAL, INPLACE, OUT, MUTABLE = "functional", "inplace", "out", "mutable"
_TYPES = {
    "Optional[Tensor]": "Tensor?",
    "List[Tensor]": "Tensor[]",
    "List[Optional[Tensor]]": "Tensor?[]",
}
"""Types as torch prints them, mapped to their spelling in native_functions.yaml."""


class ArgumentLike(Protocol):
    """An argument or a result."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def writes(self) -> bool: ...

    @property
    def required(self) -> bool: ...


class SchemaLike(Protocol):
    """The facts about an operator that replacing it requires."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def arguments(self) -> Sequence[ArgumentLike]: ...

    @property
    def returns(self) -> Sequence[ArgumentLike]: ...

    @property
    def tags(self) -> Collection[str]: ...


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument or a result of a schema."""

    name: str
    type: str
    writes: bool
    required: bool = True
    """Whether every call must pass it."""
    always_positional: bool = True
    """Whether every call passes it by position."""
    default: Any = None
    """Its value in calls that leave it out."""


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """One overload of an ATen operator, for example ``add.Tensor``."""

    name: str
    kind: str
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    composite: bool
    """Whether it is CompositeImplicitAutograd: autograd sees the operators that it calls.

    False for the few that also have a CPU or CUDA kernel of their own.
    """
    tags: frozenset[str] = frozenset()


def schema_of(name: str) -> OperatorSchema | None:
    """Return the facts of an overload; None if this torch lacks it."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    operator = getattr(packet, overload, None)
    if operator is None:
        return None
    schema = operator._schema  # noqa: SLF001  # torch has no public name for it
    arguments = tuple(_argument(a) for a in schema.arguments)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    full_name = f"aten::{dispatcher_name(name)}"
    composite = has_kernel(full_name, "CompositeImplicitAutograd") and not (
        has_kernel(full_name, "CPU") or has_kernel(full_name, "CUDA")
    )
    returns = tuple(_argument(r) for r in schema.returns)
    return OperatorSchema(
        name, _form(schema, arguments), arguments, returns, composite, frozenset(t.name for t in operator.tags)
    )


def tensor_positions(op: OperatorSchema) -> tuple[int, ...]:
    """Return the positions of an operator's tensors; empty if it takes lists of tensors."""
    tensors = [(i, a.type) for i, a in enumerate(op.arguments) if "Tensor" in a.type]
    return tuple(i for i, _ in tensors) if all(kind in ("Tensor", "Tensor?") for _, kind in tensors) else ()


def tensors_come_first(op: OperatorSchema) -> bool:
    """Whether all tensors come first in every call, and the result is one tensor."""
    tensors = ["Tensor" in a.type and a.always_positional for a in op.arguments]
    leading_count = tensors.index(False) if False in tensors else len(tensors)
    return leading_count == len(tensor_positions(op)) and [r.type for r in op.returns] == ["Tensor"]


def takes_any_number(op: OperatorSchema) -> bool:
    """Whether an argument accepts both integers and other numbers."""
    return any("number" in a.type for a in op.arguments)


def dispatcher_name(name: str) -> str:
    """Return an operator's name as the dispatcher spells it: without ``.default``."""
    return name.removesuffix(".default")


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    writes = argument.alias_info is not None and argument.alias_info.is_write
    required = not argument.has_default_value()
    always = required and not argument.kwarg_only
    return Argument(argument.name, _TYPES.get(kind, kind), writes, required, always, argument.default_value)


def _form(schema: Any, arguments: Sequence[Argument]) -> str:
    if not any(a.writes for a in arguments):
        return FUNCTIONAL
    if any(argument.is_out for argument in schema.arguments):
        return OUT
    base = schema.name.partition("::")[2]
    return INPLACE if base.endswith("_") and not base.endswith("__") and arguments[0].writes else MUTABLE
