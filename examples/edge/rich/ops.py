"""Operators with what schemas can hold: several results, numbers, text, lists, and arguments that may be missing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opforge.edge.variants import register_out

library = torch.library.Library("rich_ops", "FRAGMENT")
library.define('affine(Tensor x, Scalar factor, Tensor? offset=None, str activation="none") -> Tensor')
library.define("weighted_sum(Tensor[] tensors, int[] weights) -> Tensor")
library.define("row_range(Tensor x, bool keepdim=False) -> (Tensor, Tensor)")


@torch.library.impl(library, "affine", "CompositeExplicitAutograd")
def affine(x: Tensor, factor: float, offset: Tensor | None = None, activation: str = "none") -> Tensor:
    """Return ``factor * x + offset``, negative elements as 0 with activation relu."""
    if activation not in ("none", "relu"):
        raise ValueError(f"affine: activation {activation!r} is unknown; allowed: none, relu")
    y = x * factor
    if offset is not None:
        y = y + offset
    return y.relu() if activation == "relu" else y


@torch.library.impl(library, "weighted_sum", "CompositeExplicitAutograd")
def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the sum of tensors of one shape, each times its weight."""
    if len(tensors) != len(weights) or not tensors:
        raise ValueError(f"weighted_sum: {len(tensors)} tensors and {len(weights)} weights; there must be as many")
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * weight
    return total


@torch.library.impl(library, "row_range", "CompositeExplicitAutograd")
def row_range(x: Tensor, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the least and the largest element of each row."""
    return x.amin(-1, keepdim=keepdim), x.amax(-1, keepdim=keepdim)


@torch.library.register_fake("rich_ops::affine", lib=library)
def _(x, factor, offset=None, activation="none"):
    return torch.empty_like(x)


@torch.library.register_fake("rich_ops::weighted_sum", lib=library)
def _(tensors, weights):
    return torch.empty_like(tensors[0])


@torch.library.register_fake("rich_ops::row_range", lib=library)
def _(x, keepdim=False):
    shape = [*x.shape[:-1], 1] if keepdim else x.shape[:-1]
    return x.new_empty(shape), x.new_empty(shape)


register_out("rich_ops::affine", "rich_ops::weighted_sum", "rich_ops::row_range")
