"""Operators whose zeros have signs that do not depend on the way of computing."""

from __future__ import annotations

from opforge.judge.facts import facts_of
from opforge.ops import Operator


def zero_signs_matter(op: Operator, *, is_complex: bool = False) -> bool:
    """Whether the zeros of an operator's results must have ATen's signs.

    The signs in complex products differ by formula.
    """
    if "_backward" in op.base or op.is_random:
        return False
    signs = facts_of(op).zero_signs
    return "pointwise" in op.tags and not is_complex if signs is None else signs
