"""A call as the cost model sees it: input tensors, written tensors and new memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from opforge.judge.kinds import Kind
from opforge.judge.regions import distinct_bytes, storage, tensors_in
from opforge.ops import Form, Operator

_F8_DTYPES = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point and d.itemsize == 1}
_PRODUCTS = {
    torch.float64: Kind.F64_PRODUCT,
    torch.complex128: Kind.F64_PRODUCT,
    torch.float32: Kind.F32_PRODUCT,
    torch.complex64: Kind.F32_PRODUCT,
    torch.float16: Kind.F16_PRODUCT,
    torch.complex32: Kind.F16_PRODUCT,
    torch.bfloat16: Kind.BF16_PRODUCT,
    torch.int8: Kind.I8_PRODUCT,
    torch.uint8: Kind.I8_PRODUCT,
    **dict.fromkeys(_F8_DTYPES, Kind.F8_PRODUCT),
}


@dataclass(frozen=True)
class CostedCall:
    """A call of an operator with its result."""

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @cached_property
    def values(self) -> dict[str, Any]:
        return self.op.bind(self.args, self.kwargs)

    def tensors(self, *names: str) -> list[torch.Tensor]:
        """Return the tensors of some arguments; omitted arguments have none."""
        return [t for name in names for t in tensors_in(self.values.get(name))]

    @cached_property
    def written(self) -> list[torch.Tensor]:
        """The arguments that the operator writes to."""
        return self.tensors(*(a.name for a in self.op.arguments if a.writes))

    @cached_property
    def fresh(self) -> list[torch.Tensor]:
        """Results that are not views of inputs."""
        input_storages = {storage(t) for t in self.tensors(*self.values) if t.layout is torch.strided}
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        returns = self.op.returns if len(self.op.returns) == len(results) else (None,) * len(results)
        new_values = [
            value for value, declared in zip(results, returns, strict=True) if declared is None or not declared.writes
        ]
        return [t for t in tensors_in(new_values) if t.layout is not torch.strided or storage(t) not in input_storages]

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        return [*self.written, *self.fresh]

    @cached_property
    def inputs(self) -> dict[str, list[torch.Tensor]]:
        """Input tensors by argument, without those that are only written to (``out``)."""
        return {name: tensors for name in self.op.parameters if (tensors := self.tensors(name))}

    @property
    def in_place(self) -> bool:
        return bool(self.written) and self.op.form is not Form.OUT

    def number(self, name: str, default: float) -> Any:
        value = self.values.get(name, default)
        return default if value is None else value

    @property
    def largest(self) -> int:
        """The number of elements of the largest tensor."""
        return max((t.numel() for t in [*self.outputs, *self.tensors(*self.inputs)]), default=0)

    def kind(self) -> Kind:
        """Return the kind of arithmetic of an elementwise operator."""
        dtypes = {t.dtype for t in [*self.tensors(*self.inputs), *self.outputs]}
        if dtypes & {torch.float64, torch.complex128}:
            return Kind.F64
        return Kind.F32 if any(d.is_floating_point or d.is_complex for d in dtypes) else Kind.INTEGER


def product_kind(left: torch.Tensor) -> Kind:
    """Return the kind of arithmetic of a matrix product."""
    return _PRODUCTS.get(left.dtype, Kind.INTEGER)


def product_flops(left: torch.Tensor, flops: int) -> int:
    """Return the operations on real numbers: a complex product has four."""
    return 4 * flops if left.is_complex() else flops


def some_bytes(source: torch.Tensor, elements: int) -> int:
    """Return the bytes of this many elements of a tensor, at most all that it has."""
    return min(int(elements * source.element_size()), distinct_bytes([source]))


def has_nan(values: Iterable[Any]) -> bool:
    return any(isinstance(v, float) and math.isnan(v) for v in values)
