"""Guarded memory: arguments and an operator's allocations lie inside larger, filled buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.check.operator_call import OperatorCall
from opforge.check.subject import attempt

GUARD_ELEMENTS = 4096
"""Guard elements on each side, more than a kernel's block."""
FILL_VALUE = -12345.0
"""A rare value, used as fill."""
_MAX_GUARDED_ELEMENTS = 1 << 26
_ALLOCATING_OPERATORS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty_permuted",
}


@dataclass
class GuardedTensor:
    """A tensor in the middle of a buffer filled with one value."""

    buffer: torch.Tensor
    tensor: torch.Tensor
    count: int
    fill: float

    def describe_damage(self) -> str:
        """Describe writes to the buffer outside the tensor; empty if there are none."""
        filled = _holds_fill(self.buffer, self.fill)
        for side, part in (
            ("before its beginning", filled[:GUARD_ELEMENTS]),
            ("past its end", filled[GUARD_ELEMENTS + self.count :]),
        ):
            if not bool(part.all()):
                places = (~part).nonzero().reshape(-1)
                return (
                    f"{len(places)} elements {side} (the first "
                    f"{int(places[0]) + 1 if side == 'past its end' else GUARD_ELEMENTS - int(places[-1])} away)"
                )
        return ""

    def unwritten_mask(self) -> torch.Tensor:
        """Return a mask of the tensor's elements that still hold the fill value."""
        return _holds_fill(self.tensor, self.fill)


def _holds_fill(t: torch.Tensor, fill: float) -> torch.Tensor:
    value = torch.full((), fill, dtype=torch.float64)
    if t.is_complex():
        t = t.real
    if math.isnan(fill) and t.is_floating_point():
        return torch.isnan(t)
    return t == _fill_in_dtype(value, t.dtype).to(t.device)


def _fill_in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return value.to(dtype)
    if dtype == torch.bool:
        return torch.full((), True)
    rare = 85 if not bool(torch.isnan(value)) else 42  # integers have no NaN: use two rare values
    return torch.full((), rare, dtype=dtype)


def allocate_guarded(size: Any, stride: Any, dtype: torch.dtype, device: Any, fill: float) -> GuardedTensor:
    """Allocate a filled buffer with a tensor of this geometry inside."""
    count = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
    buffer = torch.empty(count + 2 * GUARD_ELEMENTS, dtype=dtype, device=device)
    buffer.copy_(_fill_in_dtype(torch.full((), fill, dtype=torch.float64), dtype).expand_as(buffer))
    return GuardedTensor(buffer, buffer.as_strided(size, stride, GUARD_ELEMENTS), count, fill)


def guard_arguments(call: OperatorCall, fill: float) -> tuple[OperatorCall, list[GuardedTensor]]:
    """Return a call with its tensors contiguous in the middle of filled buffers."""
    buffers: list[GuardedTensor] = []

    def place(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided:
            return t
        contiguous = t.detach().contiguous()
        buffer = allocate_guarded(contiguous.shape, contiguous.stride(), contiguous.dtype, contiguous.device, fill)
        buffer.tensor.copy_(contiguous)
        buffers.append(buffer)
        return buffer.tensor

    return call.map_tensors(place), buffers


@dataclass
class _GuardedAllocations(TorchDispatchMode):  # type: ignore[misc]
    """Replaces a kernel's uninitialised allocations by tensors in filled buffers."""

    fill: float
    buffers: list[GuardedTensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in _ALLOCATING_OPERATORS or not isinstance(result, torch.Tensor):  # noqa: SLF001
            return result
        if (
            result.layout != torch.strided
            or not 0 < result.numel() < _MAX_GUARDED_ELEMENTS
            or result.device.type == "meta"
        ):
            return result
        buffer = allocate_guarded(result.shape, result.stride(), result.dtype, result.device, self.fill)
        self.buffers.append(buffer)
        return buffer.tensor


def call_guarded(overload: Any, call: OperatorCall, device: str, fill: float) -> tuple[Any, list[GuardedTensor]]:
    """Call an operator's kernel directly, below autograd; its allocations get filled buffers."""
    kernel = torch.library.get_kernel(overload, device.upper())
    keys = torch._C._dispatch_keys(next(iter(call.tensors)))  # noqa: SLF001  # torch has no public name for it
    positional = _positional_arguments(overload, call)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), _GuardedAllocations(fill) as mode:  # noqa: SLF001
        value = kernel.call_boxed(keys, *positional)
    return value, mode.buffers


def writes_out_of_bounds(overload: Any, call: OperatorCall, device: str) -> bool:
    """Whether a call writes outside its tensors; it runs in guarded memory, so no harm is done."""
    if not call.tensors or any(t.layout != torch.strided for t in call.tensors):
        return False
    guarded_call, argument_buffers = guard_arguments(call, FILL_VALUE)
    outcome = attempt(call_guarded, overload, guarded_call, device, FILL_VALUE)
    if isinstance(outcome, Exception):  # refused arguments, or no way to call the kernel like this
        return False
    return any(buffer.describe_damage() for buffer in (*outcome[1], *argument_buffers))


def _positional_arguments(overload: Any, call: OperatorCall) -> list[Any]:
    """Return all arguments in the order of the schema; call_boxed takes no keywords."""
    arguments = overload._schema.arguments  # noqa: SLF001
    rest = arguments[len(call.args) :]
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in rest}
    return [*call.args, *(call.kwargs.get(name, default) for name, default in defaults.items())]
