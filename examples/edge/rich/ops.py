"""Operators with what schemas can hold: several results, numbers, text, lists, and arguments that may be missing."""

from collections.abc import Sequence

from torch import Tensor

from opforge.edge.define import define


def affine(x: Tensor, factor: float, offset: Tensor | None = None, activation: str = "none") -> Tensor:
    """Return ``factor * x + offset``; activation relu makes 0 of what is negative."""
    if activation not in ("none", "relu"):
        raise ValueError(f"affine: activation {activation!r} is unknown; allowed: none, relu")
    y = x * factor
    if offset is not None:
        y = y + offset
    return y.relu() if activation == "relu" else y


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the sum of tensors of one shape, each times its weight."""
    if len(tensors) != len(weights) or not tensors:
        raise ValueError(f"weighted_sum: {len(tensors)} tensors and {len(weights)} weights; there must be as many")
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * weight
    return total


def row_range(x: Tensor, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the least and the largest element of each row."""
    return x.amin(-1, keepdim=keepdim), x.amax(-1, keepdim=keepdim)


define('rich_ops::affine(Tensor x, Scalar factor, Tensor? offset=None, str activation="none") -> Tensor', affine)
define("rich_ops::weighted_sum(Tensor[] tensors, int[] weights) -> Tensor", weighted_sum)
define("rich_ops::row_range(Tensor x, bool keepdim=False) -> (Tensor, Tensor)", row_range)
