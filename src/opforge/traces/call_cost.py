"""Cost of a call, from its arguments: input bytes, and FLOPs of operators made of products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opforge.cases.values import Arguments, TensorSpec
from opforge.ops import table
from opforge.runtime.trees import instances
from opforge.traces.contents import BoundArguments

_OFFSET_LIMIT_ELEMENTS = 4096
"""Storage offsets of this many elements or more are reduced."""


def input_bytes(data: Arguments) -> int:
    """Return the bytes of memory that a call's tensors span."""
    return sum(with_small_offset(spec).storage_nbytes for spec in instances(data, TensorSpec))


def with_small_offset(spec: TensorSpec) -> TensorSpec:
    """Return a tensor with its storage offset reduced to what a replay needs, alignment kept."""
    if spec.offset < _OFFSET_LIMIT_ELEMENTS or spec.at is not None:
        return spec
    return replace(spec, offset=spec.offset % _OFFSET_LIMIT_ELEMENTS)


def flops(op: str, data: Arguments) -> int:
    """Return the FLOPs of a matrix product, convolution or attention; 0 for other operators."""
    facts = table().get(op)
    formula = None if facts is None else _FLOP_FORMULAS.get(facts.packet)
    if facts is None or formula is None:
        return 0
    try:
        return int(formula(facts.bind(*data)))
    except (KeyError, IndexError, AttributeError, TypeError, ZeroDivisionError):
        return 0  # the formula is not for these arguments


def estimate_result_bytes(op: str, data: Arguments) -> int:
    """Estimate the result bytes of a call whose result is unknown.

    It is the size of a factory's or product's result, or of the largest input.
    """
    facts = table().get(op)
    if facts is None or any(r.alias is not None for r in facts.returns):
        return 0
    given = facts.bind(*data)
    specs = list(instances(data, TensorSpec))
    sizes = given.get("size")
    if isinstance(sizes, list | tuple) and all(isinstance(n, int) for n in sizes):
        return math.prod(n for n in sizes if isinstance(n, int)) * (specs[0].itemsize if specs else 4)
    if (product := _PRODUCTS.get(facts.packet)) is not None:
        left, right = (given.get(name) for name in product)
        if isinstance(left, TensorSpec) and isinstance(right, TensorSpec):
            return math.prod((*left.shape[:-1], right.shape[-1])) * left.itemsize
    return max((s.numel * s.itemsize for s in specs), default=0)


def _product(left: str, right: str) -> Callable[[BoundArguments], int]:
    return lambda given: 2 * math.prod(given[left].shape) * given[right].shape[-1]


def _convolution(given: BoundArguments) -> Any:
    data, weight = given["input"].shape, given["weight"].shape
    inner = math.prod(weight[1:])
    if given.get("transposed"):
        return 2 * math.prod(data) * inner
    steps = math.prod(s for s, _ in zip(_stride_per_dim(given["stride"]), data[2:], strict=False))
    return 2 * data[0] * weight[0] * math.prod(data[2:]) / steps * inner


def _stride_per_dim(steps: list[int]) -> list[int]:
    return steps * 3 if len(steps) == 1 else steps


def _attention(given: BoundArguments) -> Any:
    query, key = given["query"].shape, given["key"].shape
    return 4 * math.prod(query) * key[-2]


_PRODUCTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_scaled_mm": ("self", "mat2"),
}
_FLOP_FORMULAS: dict[str, Callable[[BoundArguments], float]] = {
    **{name: _product(*arguments) for name, arguments in _PRODUCTS.items()},
    "convolution": _convolution,
    "cudnn_convolution": _convolution,
    "mkldnn_convolution": _convolution,
    "convolution_backward": lambda given: 2 * _convolution(given),
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_backward": lambda given: 2.5 * _attention(given),
    "_scaled_dot_product_efficient_attention_backward": lambda given: 2.5 * _attention(given),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda given: 2.5 * _attention(given),
}
