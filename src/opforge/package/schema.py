"""Operator schemas such as ``scale_add(Tensor x, Tensor y, float a=1.0, int[] dims=[]) -> Tensor`` for `add-op`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opforge.errors import OpforgeError

TYPES = {
    "Tensor": "Tensor", "Tensor?": "Tensor | None", "int": "int", "float": "float", "bool": "bool",
    "int[]": "list[int]", "float[]": "list[float]",
}  # fmt: skip
"""Allowed types of arguments, each with its type in Python."""
_TEST_VALUES: dict[str, Any] = {"int": 3, "float": 0.5, "bool": True, "int[]": [2, 1], "float[]": [0.5, 1.5]}
_DIMENSIONS = {"dim": ("int", "int[]"), "dims": ("int[]",)}
_SIZES = ("size", "sizes", "shape")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator."""

    name: str
    type: str
    default: str | None = None
    """Its default as in the schema; None if it must be given."""

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")

    @property
    def optional(self) -> bool:
        return self.type == "Tensor?"

    @property
    def is_list(self) -> bool:
        return self.type.endswith("[]")

    def parameter(self, default: str = "", *, tuples: bool = False) -> str:
        """Return the parameter of a Python function; ``default`` replaces its default.

        ``tuples`` lets a list be a tuple too, which is what its default is.
        """
        kind = TYPES[self.type]
        if self.is_list and tuples:
            kind = f"{kind} | {kind.replace('list[', 'tuple[').replace(']', ', ...]')}"
        return f"{self.name}: {kind}" + ("" if self.default is None else f" = {default or self._python_default()}")

    def _python_default(self) -> str:
        value = ast.literal_eval(str(self.default).replace("true", "True").replace("false", "False"))
        return repr(tuple(value) if self.is_list else float(value) if self.type == "float" else value)


@dataclass(frozen=True, slots=True)
class Schema:
    """What a schema asks of the operator's files."""

    op: str
    text: str
    arguments: tuple[Argument, ...]
    mutates: bool
    outputs: int

    @property
    def tensors(self) -> list[Argument]:
        return [a for a in self.arguments if a.is_tensor]

    @property
    def dims(self) -> Argument | None:
        """The argument with the dimensions to sum over."""
        return (
            next((a for a in self.arguments if a.type in _DIMENSIONS.get(a.name, ())), None) if self.tensors else None
        )

    @property
    def keepdim(self) -> Argument | None:
        wanted = Argument("keepdim", "bool")
        return (
            next((a for a in self.arguments if (a.name, a.type) == (wanted.name, wanted.type)), None)
            if self.dims
            else None
        )

    @property
    def size(self) -> Argument | None:
        """The size of the results of an operator without tensors."""
        return (
            None if self.tensors else next((a for a in self.arguments if a.name in _SIZES and a.type == "int[]"), None)
        )

    @property
    def numbers(self) -> list[Argument]:
        """The numbers and lists that are added to the results."""
        used = (self.dims, self.keepdim, self.size)
        return [a for a in self.arguments if not a.is_tensor and a not in used]

    def test_values(self) -> dict[str, Any]:
        """Return values of the arguments that are no tensors, for the operator's tests."""
        special = {self.dims: [-1] if self.dims and self.dims.type == "int[]" else -1, self.size: [2, 3]}
        return {a.name: special.get(a, _TEST_VALUES.get(a.type)) for a in self.arguments if not a.is_tensor}


def parse(text: str) -> Schema:
    """Parse a schema; raise OpforgeError for what `add-op` cannot generate."""
    from torchgen.model import FunctionSchema

    text = re.sub(r"\(\s+", "(", " ".join(text.split()))
    op = text.partition("(")[0]
    try:
        parsed = FunctionSchema.parse(f"op{text[len(op) :]}")  # torchgen reads more into names such as add_
    except (AssertionError, RuntimeError, ValueError) as error:
        raise OpforgeError(
            f"{text!r} is not a schema that can be generated: {' '.join(str(error).split())[:200]}; write it as in "
            '"scale_add(Tensor x, Tensor? bias=None, float a=1.0, int[] dims=[]) -> (Tensor, Tensor)"'
        ) from None
    if parsed.arguments.flat_kwarg_only or parsed.arguments.out:
        raise OpforgeError(f"{text!r} has arguments after `*`, which add-op does not generate; put them before it")
    arguments = tuple(_argument(a, text) for a in parsed.arguments.flat_positional)
    written = [a for a in parsed.arguments.flat_positional if a.annotation is not None]
    schema = Schema(op, text, arguments, bool(written), len(parsed.returns))
    _check(schema, [a.name for a in written], [str(r) for r in parsed.returns])
    return schema


def _argument(parsed: Any, text: str) -> Argument:
    kind = re.sub(r"\[\d+\]", "[]", str(parsed.type))
    if kind not in TYPES:
        raise OpforgeError(f"argument {parsed.name!r} of {text!r} has type {kind}; allowed: {', '.join(TYPES)}")
    if kind == "Tensor?" and parsed.default != "None":
        raise OpforgeError(f"argument {parsed.name!r} of {text!r} needs a default: Tensor? {parsed.name}=None")
    if parsed.annotation is not None and not parsed.annotation.is_write:
        raise OpforgeError(
            f"argument {parsed.name!r} of {text!r} is returned as a view, which add-op does not generate"
        )
    return Argument(parsed.name, kind, parsed.default)


def _check(schema: Schema, written: Sequence[str], returns: Sequence[str]) -> None:
    """Reject what is valid in torch and has no files."""
    first = next(iter(schema.tensors), None)
    if first is not None and first.optional:
        raise OpforgeError(
            f"the first tensor of {schema.text!r} is {first.name}, which is optional; let it be required"
        )
    if first is not None and written not in ([], [first.name]):
        raise OpforgeError(
            f"{schema.text!r} writes into {', '.join(written)}; add-op generates operators that write into the first "
            f"tensor only, which is {first.name}"
        )
    if not returns and not schema.mutates:
        raise OpforgeError(f"{schema.text!r} returns nothing and writes nothing; return a Tensor, or write Tensor(a!)")
    if wrong := [r for r in returns if r != "Tensor"]:
        hint = "; return nothing of what was written: the Python function returns it" if "!" in wrong[0] else ""
        raise OpforgeError(f"{schema.text!r} returns {wrong[0]}; allowed: (), Tensor, (Tensor, Tensor), …{hint}")
    if schema.mutates and schema.dims:
        raise OpforgeError(f"{schema.text!r} writes into {written[0]} and sums over {schema.dims.name}; do one of them")
    defaults = [a.default is not None for a in schema.arguments]
    if defaults != sorted(defaults):
        late = schema.arguments[defaults.index(True)].name
        raise OpforgeError(f"{schema.text!r}: {late} has a default, and an argument after it has none; reorder them")
