"""Operator schemas, and the out variant of a functional schema. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from torchgen.model import FunctionSchema

_EXAMPLE = "my_ops::mul3(Tensor x) -> Tensor"


@dataclass(frozen=True, slots=True)
class OutVariant:
    """An operator's functional form with its out variant."""

    namespace: str
    name: str
    functional_schema: str
    """Schema without the namespace."""
    out_schema: str
    out_arguments: tuple[str, ...]
    """Names of the arguments that are written: ``out``, or ``out0``, ``out1``."""


def out_variant(schema: str) -> OutVariant:
    """Return the out variant of a functional schema: the same arguments, plus one per result."""
    namespace, separator, functional = " ".join(schema.split()).partition("::")
    if not separator or not namespace.isidentifier():
        raise OpforgeError(f"{schema!r} has no namespace; write it as {_EXAMPLE!r}")
    parsed = parse_schema(functional)
    name = functional.partition("(")[0]
    if not name.isidentifier():
        raise OpforgeError(f"{schema!r}: {name!r} is not a plain name; the overload .out is added for the out variant")
    if parsed.arguments.out or any(argument.is_write for argument in parsed.arguments.flat_all):
        raise OpforgeError(f"{schema!r} writes to an argument; give the functional form, the out variant is derived")
    results = [str(result.type) for result in parsed.returns]
    if not results or any(kind != "Tensor" for kind in results):
        raise OpforgeError(
            f"{schema!r} returns {', '.join(results) or 'nothing'}; the runtime writes tensors: one or more"
        )
    outputs = ("out",) if len(results) == 1 else tuple(f"out{number}" for number in range(len(results)))
    marks = [f"Tensor({chr(ord('a') + number)}!)" for number in range(len(results))]
    arguments = str(parsed.arguments)
    keyword = "" if parsed.arguments.pre_tensor_options_kwarg_only else "*, "
    added = ", ".join(f"{mark} {output}" for mark, output in zip(marks, outputs, strict=True))
    returned = marks[0] if len(marks) == 1 else f"({', '.join(marks)})"
    return OutVariant(
        namespace,
        name,
        functional,
        f"{name}.out({arguments}{', ' if arguments else ''}{keyword}{added}) -> {returned}",
        outputs,
    )


def parse_schema(schema: str) -> FunctionSchema:
    """Parse a schema given without its namespace; raise if it is invalid."""
    from torchgen.model import FunctionSchema

    try:
        return FunctionSchema.parse(schema)
    except (AssertionError, RuntimeError, ValueError, KeyError) as error:
        spaced = re.search(r"=\[[^\]]*, ", schema) is not None
        hint = "; write lists without spaces, as in int[] dims=[0,1]" if spaced else ""
        raise OpforgeError(f"{schema!r} is not a schema: {' '.join(str(error).split())}{hint}") from None
