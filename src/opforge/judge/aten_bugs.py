"""Hostile variants that PyTorch itself does not survive, found with allocator checks; never run."""

from __future__ import annotations

from opforge.cases.variants import ILL_CONDITIONED
from opforge.judge.facts import facts_of
from opforge.ops import Operator
from opforge.ops.undefined import is_solver

_EQUIVALENT_LAYOUTS = {"strided": "pitched", "transposed": "permuted"}
"""By layout: another layout on which ATen behaves the same."""
_SCALE_ARGUMENTS = frozenset(
    f"argument:{name}" for name in ("scales", "scales_d", "scales_h", "scales_w", "scale_factors")
)


def crashing_variants(op: Operator) -> frozenset[str]:
    """Return the variants that crash ATen on an operator, or to which it has no defined answer."""
    facts = facts_of(op)
    crashing = frozenset(facts.crashes_on if facts.crashes_only_in in ("", op.name) else ())
    crashing |= {equivalent for name, equivalent in _EQUIVALENT_LAYOUTS.items() if name in crashing}
    if "upsample" in op.packet:
        crashing |= _SCALE_ARGUMENTS  # a scale that contradicts the result's size makes ATen read out of bounds
    return ILL_CONDITIONED | crashing if is_solver(op.packet) else crashing
