"""``get_operator``: torch's operator of a name."""

import warnings
from typing import Any, Self

import torch

from opforge.errors import UnknownNameError
from opforge.ops import Operator, table

OpOverload = type(torch.ops.aten.relu.default)


class CustomOperator(str):
    """An implementation ``{op}__NAME`` of an operator that is not ATen's; ``op`` is the operator."""

    __slots__ = ("op",)

    def __new__(cls, name: str, op: str) -> Self:
        made = super().__new__(cls, name)
        made.op = op
        return made

    @property
    def __name__(self) -> str:
        return str(self)


def get_operator(name_or_operator: Any) -> Any:
    """Return the operator of a name such as ``add.Tensor``, or None with a warning; an operator stays as it is."""
    if not isinstance(name_or_operator, str):
        return name_or_operator
    try:
        return torch_operator(table().resolve(name_or_operator))
    except UnknownNameError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def torch_operator(op: Operator) -> Any:
    """Return torch's operator of a row of opforge's table."""
    return getattr(getattr(torch.ops.aten, op.base), op.overload or "default")


def name_of(op: Any) -> str:
    """Return opforge's name of an operator: of ``torch.ops.aten.add.Tensor``, of ``torch.add``, or of a name."""
    if isinstance(op, CustomOperator):
        return op.op
    if isinstance(op, OpOverload):
        return table().resolve(op.name()).name
    return table().resolve(op if isinstance(op, str) else str(getattr(op, "__name__", op))).name
