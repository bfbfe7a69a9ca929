"""One function per mutant: turns a call of ATen into an answer that is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from opforge.cases.values import contiguous_strides
from opforge.kernels.mutants import IGNORED_PREFIX
from opforge.sandbox.mutants.aten_call import AtenCall, CallResult, Change

Mutation = Callable[[AtenCall], CallResult | None]
"""Returns None where the mutant does not apply. Values that do not fit the result are ignored."""

_MANTISSA = {
    torch.float64: (torch.int64, 52, 23),
    torch.float32: (torch.int32, 23, 10),
    torch.float16: (torch.int16, 10, 4),
    torch.bfloat16: (torch.int16, 7, 4),
}
"""Integer dtype of the same size, mantissa bits, and mantissa bits kept."""


def mutation_for(name: str) -> Mutation:
    """Return the mutation of this name."""
    if name.startswith(IGNORED_PREFIX):
        argument = name.removeprefix(IGNORED_PREFIX)
        return lambda call: _ignored(call, argument)
    return _MUTATIONS[name]


def _result_mutation(change: Change) -> Mutation:
    """Make a mutation from a change to each tensor of the answer."""
    return lambda call: call.truth.map(lambda v: change(v) if isinstance(v, torch.Tensor) else v)


def _zeros(call: AtenCall) -> CallResult:
    return call.truth.map(lambda v: torch.zeros_like(v) if isinstance(v, torch.Tensor) else _plain_zero(v))


def _plain_zero(value: Any) -> Any:
    return type(value)(0) if isinstance(value, bool | int | float | complex) else value


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() <= 1:
        return tensor
    averaged = tensor.is_floating_point() or tensor.is_complex()
    value = tensor.mean() if averaged else tensor.reshape(-1)[0]
    return value.to(tensor.dtype).expand(tensor.shape)


def _first_row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() >= 2 and tensor.shape[0] > 1 else tensor


def _blank_end(tensor: torch.Tensor, count: int) -> torch.Tensor:
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    flat[len(flat) - count :] = 0
    return flat.view(tensor.shape)


def _tail(tensor: torch.Tensor) -> torch.Tensor:
    return _blank_end(tensor, -(-tensor.numel() // 4)) if tensor.numel() > 1 else tensor


def _edge(call: AtenCall) -> CallResult:
    inputs = call.inputs

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() <= 1:
            return value
        return _shifted(value) if shares_storage(value, inputs) and not call.op.mutates else _blank_end(value, 1)

    return call.truth.map(change)


def _shifted(view: torch.Tensor) -> torch.Tensor:
    """Return a view that begins one element later, or earlier where the storage ends."""
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    offset, count = view.storage_offset(), view.untyped_storage().nbytes() // view.element_size()
    if offset + 1 + last < count:
        return view.as_strided(view.shape, view.stride(), offset + 1)
    return view.as_strided(view.shape, view.stride(), offset - 1) if offset else view


def _identity(call: AtenCall) -> CallResult:
    inputs = call.inputs

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fitting = (t for t in inputs if t.shape == value.shape and t.dtype == value.dtype)
        input_alike = next(fitting, None)
        return value if input_alike is None else torch.ops.aten.alias(input_alike)

    return call.truth.map(change)


def _nothing_written(call: AtenCall) -> CallResult:
    return CallResult(call.truth.new_values, call.written_before())


def _float_mutation(change: Change) -> Mutation:
    """Make a mutation from a change to the floats of inputs and results."""

    def floats(value: Any) -> Any:
        return _changed_floats(value, change) if isinstance(value, torch.Tensor) else value

    return lambda call: (call.repeat(floats) or call.truth).map(floats)


def _changed_floats(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """Return a tensor with changed floats and the same layout; the tensor itself if none changes.

    The parts of complex numbers count as floats.
    """
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(_changed_floats(parts, change))
    if not tensor.is_floating_point():
        return tensor
    plain = tensor.resolve_neg()
    count = plain.untyped_storage().nbytes() // plain.element_size()
    flat = plain.as_strided((count,), (1,), 0)
    changed = change(flat)
    return tensor if changed is flat else changed.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def truncate_mantissas(flat: torch.Tensor) -> torch.Tensor:
    """Truncate mantissas towards zero; signs, zeros, NaN and inf stay."""
    if flat.dtype not in _MANTISSA:
        return flat
    integer, bits, kept = _MANTISSA[flat.dtype]
    cut = (flat.view(integer) & (-1 << (bits - kept))).view(flat.dtype)
    return torch.where(flat.isnan(), flat, cut)


def _without_nan(flat: torch.Tensor) -> torch.Tensor:
    nans = flat.isnan()
    return flat.masked_fill(nans, 0.0) if nans.any() else flat


def _without_inf(flat: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(flat.dtype).max
    return flat.clamp(-limit, limit) if flat.isinf().any() else flat


def ignore_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as read by a kernel that ignores strides, from the tensor's own offset on."""
    strides = contiguous_strides(tuple(tensor.shape))
    return tensor if tensor.is_contiguous() else _reread(tensor, strides, tensor.storage_offset())


def ignore_offset(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as read by a kernel that ignores the storage offset."""
    return _reread(tensor, tensor.stride(), 0) if tensor.storage_offset() else tensor


def _reread(tensor: torch.Tensor, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    if tensor.numel() == 0 or offset + last < count:
        return tensor.as_strided(tensor.shape, strides, offset)
    index = torch.arange(tensor.numel()).add_(offset).remainder_(count)  # an expanded tensor, larger than its memory
    return tensor.as_strided((count,), (1,), 0)[index.to(tensor.device)].view(tensor.shape)


def _swapped(call: AtenCall) -> CallResult | None:
    slots = [i for i, v in enumerate(call.args) if isinstance(v, torch.Tensor)][:2]
    if len(slots) < 2:
        return None
    first, second = (call.args[i] for i in slots)
    if first.shape != second.shape or first.dtype != second.dtype:
        return None
    args = list(call.args)
    args[slots[0]], args[slots[1]] = second, first
    return replace(call, args=args).repeat()


def _ignored(call: AtenCall, argument: str) -> CallResult | None:
    given = without_argument(call, argument)
    return None if given is None else replace(call, args=given[0], kwargs=given[1]).repeat()


def without_argument(call: AtenCall, argument: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Return a call's arguments without one of them; None if it is not given."""
    if argument in call.kwargs:
        return call.args, {n: v for n, v in call.kwargs.items() if n != argument}
    names = [a.name for a in call.op.arguments]
    position = names.index(argument)
    if position >= len(call.args):
        return None
    later = dict(zip(names[position + 1 :], call.args[position + 1 :], strict=False))
    return call.args[:position], {**later, **call.kwargs}


def shares_storage(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether a tensor shares its storage with one of some others."""
    pointer = tensor.untyped_storage().data_ptr()
    return pointer != 0 and any(t.untyped_storage().data_ptr() == pointer for t in others)


_MUTATIONS: dict[str, Mutation] = {
    "control": lambda call: call.repeat(),
    "zeros": _zeros,
    "constant": _result_mutation(_constant),
    "identity": _identity,
    "first_row": _result_mutation(_first_row),
    "edge": _edge,
    "tail": _result_mutation(_tail),
    "low_precision": _float_mutation(truncate_mantissas),
    "nan_swallowed": _float_mutation(_without_nan),
    "inf_swallowed": _float_mutation(_without_inf),
    "strides_ignored": lambda call: call.repeat(ignore_strides),
    "offset_ignored": lambda call: call.repeat(ignore_offset),
    "swapped": _swapped,
    "nothing_written": _nothing_written,
}
"""`control` changes nothing: it must pass everywhere, else the making of mutants is at fault."""
