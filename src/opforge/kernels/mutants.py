"""Mutants: ATen with one deliberate error, to test whether a suite detects it.

This module has their names and, by schema, the operators that have them. A mutant is a kernel
without a file. Its behaviour is in `opforge.sandbox.mutants.mutant`; this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from opforge.ops import Operator, SchemaKind
from opforge.ops.arguments import is_omittable
from opforge.ops.undefined import UNDEFINED_CONTENTS, is_solver

IGNORED_PREFIX = "ignored:"
"""Name prefix of mutants that leave one argument at its default, such as ``ignored:alpha``."""

MUTANTS: dict[str, str] = {
    "zeros": "every element of the result is zero",
    "constant": "every element is the mean of the result (its first element, where it has no mean)",
    "identity": "the result is a copy of the first input that has its shape and dtype",
    "first_row": "every row is the first row",
    "edge": "the last element is zero; a view begins one element too late",
    "tail": "the last quarter of the elements is zero",
    "low_precision": "inputs and results keep 10 bits of mantissa (float32), 23 (float64) or 4 (half types)",
    "nan_swallowed": "NaN in inputs and results becomes zero",
    "inf_swallowed": "inf in inputs and results becomes the largest finite number",
    "strides_ignored": "inputs are read as if they were contiguous",
    "offset_ignored": "inputs are read from the start of their storage",
    "swapped": "the first two tensors are exchanged",
    "nothing_written": "the tensor to be written is returned as it was",
    IGNORED_PREFIX: "one argument with a default is left at its default",
}
"""Description of each mutant."""

_VIEW_MUTANTS = frozenset({"identity", "edge", "strides_ignored", "offset_ignored"})
"""Possible errors in a view of an input; others would allocate memory and not test the numbers."""
_RANDOM_MUTANTS = frozenset({"zeros", "constant", "identity", "tail", "nothing_written"})
"""Errors visible in a distribution; a change of one element or a few bits of a draw is not."""
_FACTORY_MUTANTS = frozenset({"zeros", "constant", "first_row", "edge", "tail", "low_precision", "nothing_written"})
"""Possible errors without an input tensor."""
EQUIVALENT_MUTANTS: dict[tuple[str, str], str] = {
    (
        "swapped",
        "quantile",
    ): "its tensors have one shape only where both are a number, and then the second is a quantile",
    ("swapped", "nanquantile"): "as quantile",
}
"""Mutant and packet: why the mutant cannot be distinguished from ATen.

Lists only those that the worker does not detect by trying (see `docs/strength.md`).
"""


def kind_of(mutant: str) -> str:
    """Return the `MUTANTS` key of a mutant's name."""
    return IGNORED_PREFIX if mutant.startswith(IGNORED_PREFIX) else mutant


def mutants_of(op: Operator) -> list[str]:
    """Return the mutants that make sense for an operator, by its schema."""
    if op.base in UNDEFINED_CONTENTS:
        return []
    return [name for name in _candidates(op) if (kind_of(name), op.packet) not in EQUIVALENT_MUTANTS]


def _candidates(op: Operator) -> Iterator[str]:
    for name in MUTANTS:
        if name == IGNORED_PREFIX:
            yield from (f"{IGNORED_PREFIX}{a.name}" for a in op.arguments if is_omittable(a))
        elif _fits(name, op):
            yield name


def _fits(name: str, op: Operator) -> bool:
    inputs = [a for a in op.arguments if a.type.startswith("Tensor") and not (op.kind is SchemaKind.OUT and a.writes)]
    if (_returns_only_views(op) and name not in _VIEW_MUTANTS) or (op.is_random and name not in _RANDOM_MUTANTS):
        return False
    if not inputs and name not in _FACTORY_MUTANTS:
        return False
    match name:
        case "nan_swallowed" | "inf_swallowed":
            return not is_solver(op.packet)  # its behaviour on those is undefined, so no case can contain one
        case "identity":
            return op.kind is not SchemaKind.INPLACE  # the same as `nothing_written`
        case "nothing_written":
            return op.mutates
        case "swapped":
            return sum(a.type == "Tensor" for a in inputs) >= 2
    return True


def _returns_only_views(op: Operator) -> bool:
    return bool(op.returns) and not op.mutates and all(r.alias and not r.writes for r in op.returns)
