"""A call as the cost model sees it: input tensors, written tensors and new memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.tensor_memory import distinct_bytes, storage_id
from opforge.ops import Operator, SchemaKind
from opforge.runtime.trees import instances

if TYPE_CHECKING:
    from opforge.judge.facts import OperatorFacts

_F8_DTYPES = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point and d.itemsize == 1}
_MATMUL_KINDS = {
    torch.float64: ArithmeticKind.F64_MATMUL,
    torch.complex128: ArithmeticKind.F64_MATMUL,
    torch.float32: ArithmeticKind.F32_MATMUL,
    torch.complex64: ArithmeticKind.F32_MATMUL,
    torch.float16: ArithmeticKind.F16_MATMUL,
    torch.complex32: ArithmeticKind.F16_MATMUL,
    torch.bfloat16: ArithmeticKind.BF16_MATMUL,
    torch.int8: ArithmeticKind.I8_MATMUL,
    torch.uint8: ArithmeticKind.I8_MATMUL,
    **dict.fromkeys(_F8_DTYPES, ArithmeticKind.F8_MATMUL),
}


@dataclass(frozen=True)
class CostedCall:
    """A call of an operator with its result."""

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    facts: OperatorFacts

    @cached_property
    def bound_arguments(self) -> dict[str, Any]:
        return self.op.bind(self.args, self.kwargs)

    def tensors(self, *names: str) -> list[torch.Tensor]:
        """Return the tensors of some arguments; omitted arguments have none."""
        return [t for name in names for t in instances(self.bound_arguments.get(name), torch.Tensor)]

    @cached_property
    def written(self) -> list[torch.Tensor]:
        """The arguments that the operator writes to."""
        return self.tensors(*(a.name for a in self.op.arguments if a.writes))

    @cached_property
    def new_results(self) -> list[torch.Tensor]:
        """Results that are not views of inputs."""
        input_storages = {storage_id(t) for t in self.tensors(*self.bound_arguments) if t.layout is torch.strided}
        results = self.result if isinstance(self.result, tuple) else (self.result,)
        returns = self.op.returns if len(self.op.returns) == len(results) else (None,) * len(results)
        new_values = [
            value for value, declared in zip(results, returns, strict=True) if declared is None or not declared.writes
        ]
        return [
            t
            for t in instances(new_values, torch.Tensor)
            if t.layout is not torch.strided or storage_id(t) not in input_storages
        ]

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        return [*self.written, *self.new_results]

    @cached_property
    def inputs(self) -> dict[str, list[torch.Tensor]]:
        """Input tensors by argument, without those that are only written to (``out``)."""
        return {name: tensors for name in self.op.input_names if (tensors := self.tensors(name))}

    @property
    def in_place(self) -> bool:
        return bool(self.written) and self.op.kind is not SchemaKind.OUT

    @property
    def written_by_out(self) -> bool:
        """Whether results are written to arguments that have no other use (``out``)."""
        return self.op.kind is SchemaKind.OUT

    def number(self, name: str, default: float) -> Any:
        value = self.bound_arguments.get(name, default)
        return default if value is None else value

    def arithmetic_kind(self) -> ArithmeticKind:
        """Return the kind of arithmetic of an elementwise operator."""
        dtypes = {t.dtype for t in [*self.tensors(*self.inputs), *self.outputs]}
        if dtypes & {torch.float64, torch.complex128}:
            return ArithmeticKind.F64
        return (
            ArithmeticKind.F32 if any(d.is_floating_point or d.is_complex for d in dtypes) else ArithmeticKind.INTEGER
        )


def matmul_kind(left: torch.Tensor) -> ArithmeticKind:
    """Return the kind of arithmetic of a matrix product, as this process allows it."""
    backend = torch.backends.mkldnn.matmul if left.device.type == "cpu" else torch.backends.cuda.matmul
    return _allowed_kind(left, backend)


def convolution_kind(source: torch.Tensor) -> ArithmeticKind:
    """Return the kind of arithmetic of a convolution, as this process allows it: TF32 on a GPU by default."""
    backend = torch.backends.mkldnn.conv if source.device.type == "cpu" else torch.backends.cudnn.conv
    return _allowed_kind(source, backend)


_ROUNDED_KINDS = {"tf32": ArithmeticKind.TF32_MATMUL, "bf16": ArithmeticKind.BF16_MATMUL}


def _allowed_kind(factor: torch.Tensor, backend: Any) -> ArithmeticKind:
    """Return the kind of arithmetic of factors; torch's setting may allow to round those in f32."""
    kind = _MATMUL_KINDS.get(factor.dtype, ArithmeticKind.INTEGER)
    return _ROUNDED_KINDS.get(backend.fp32_precision, kind) if kind is ArithmeticKind.F32_MATMUL else kind


def real_flops(left: torch.Tensor, flops: int) -> int:
    """Return the operations on real numbers: three real products make a complex one."""
    return 3 * flops if left.is_complex() else flops


def bytes_of_elements(source: torch.Tensor, elements: int) -> int:
    """Return the bytes of this many elements of a tensor, at most all that it has."""
    return min(int(elements * source.element_size()), distinct_bytes([source]))


def share_of_bytes(source: torch.Tensor, share: float) -> int:
    """Return the bytes of a share of a tensor's elements."""
    return int(distinct_bytes([source]) * share)


def has_nan(values: Iterable[Any]) -> bool:
    return any(isinstance(v, float) and math.isnan(v) for v in values)
