"""Adapters that let a functional kernel serve its in-place and out variants too.

They decline a call with NotImplementedError where a functional kernel cannot know what is right.
They do so before anything is written. ATen then answers the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .operator_schema import FUNCTIONAL, INPLACE, OUT, SchemaLike
from .trees import instances

Function = Callable[..., Any]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def adapt(function: Function, op: SchemaLike, implements: SchemaLike) -> Function:
    """Turn a kernel of another form into a callable with the signature and contract of ``op``."""
    if op.kind == implements.kind:
        return function
    if implements.kind != FUNCTIONAL or op.kind not in (INPLACE, OUT):
        raise NotImplementedError(
            f"a kernel for {implements.name} ({implements.kind}) cannot replace {op.name} ({op.kind})"
        )
    if reason := _why_not_adaptable(op, implements):
        raise NotImplementedError(f"a kernel for {implements.name} cannot replace {op.name}, {reason}")
    return _inplace(function, op) if op.kind == INPLACE else _out(function, op, implements)


def _why_not_adaptable(op: SchemaLike, implements: SchemaLike) -> str:
    """Say why a functional kernel cannot serve another form; empty if it can."""
    implemented = {a.name: a for a in implements.arguments}
    if "inplace_view" in op.tags:
        return "which changes the geometry of its tensor and not its contents"
    if also_written := [a.name for a in op.arguments[op.kind == INPLACE :] if a.writes and a.name in implemented]:
        return f"which also writes to {' and '.join(also_written)}"
    if optional := [
        a.name for a in op.arguments if not a.required and a.name in implemented and implemented[a.name].required
    ]:
        return f"in which {optional[0]} is optional"
    return ""


def _inplace(function: Function, op: SchemaLike) -> Function:
    into_itself = "pointwise" in op.tags

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _decline_overlap([self])
        _decline_shared([self], [*args, *kwargs.values()], into_itself=into_itself)
        pairs = _pairs([self], function(self, *args, **kwargs))
        for target, source in pairs:
            if source.shape != target.shape:
                raise RuntimeError(
                    f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(source.shape)}"
                )
            _check_castable(target, source)
            if target.is_complex() and source.is_floating_point():
                raise NotImplementedError("cannot write a real result to a complex tensor")
        for target, source in pairs:
            target.copy_(source)
        return self if op.returns else None

    return call


def _out(function: Function, op: SchemaLike, implements: SchemaLike) -> Function:
    into_itself = "pointwise" in op.tags
    names = [a.name for a in op.arguments if a.writes]
    functional_only = {a.name for a in implements.arguments} - {a.name for a in op.arguments}
    by_out = [name for name in ("dtype", "device") if name in functional_only]
    """Arguments that only the functional form has. The out tensor decides their values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        _decline_overlap(outs)
        _decline_shared(outs, [*args, *kwargs.values()], into_itself=into_itself)
        pairs = _pairs(outs, function(*args, **kwargs, **{name: getattr(outs[0], name) for name in by_out}))
        for target, source in pairs:
            _check_castable(target, source)
            if target.dtype != source.dtype:
                raise NotImplementedError(f"cannot write a result of {source.dtype} to a tensor of {target.dtype}")
            if target.shape != source.shape and (target.numel() or not source.is_contiguous()):
                raise NotImplementedError("cannot write the result to a tensor of another shape")
        for target, source in pairs:
            if target.shape != source.shape:
                target.resize_(source.shape)
            target.copy_(source)
        if not op.returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return call


def _decline_overlap(targets: Sequence[Any]) -> None:
    """Decline a call whose written elements share memory, in one tensor or across two.

    ATen raises for most such calls.
    """
    ranges: list[tuple[int, int]] = []
    for target in instances(targets, torch.Tensor):
        if target.numel() > 1 and 0 in target.stride() and not target.is_contiguous():
            raise NotImplementedError("elements of a written tensor share memory")
        begin, end = _address_range(target)
        if any(begin < other_end and other_begin < end for other_begin, other_end in ranges):
            raise NotImplementedError("written tensors share memory")
        ranges.append((begin, end))


def _decline_shared(targets: Sequence[Any], arguments: Sequence[Any], *, into_itself: bool) -> None:
    """Decline a call that reads memory it writes; only ATen knows whether that works.

    With ``into_itself``, an argument may be exactly the tensor that is written.
    """
    read = list(instances(arguments, torch.Tensor))
    for target in instances(targets, torch.Tensor):
        begin, end = _address_range(target)
        for value in read:
            read_begin, read_end = _address_range(value)
            if read_begin < end and begin < read_end and not (into_itself and _same_memory(value, target)):
                raise NotImplementedError("a read and a written tensor share memory")


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's memory begins and ends.

    It creates no storage object in Python: that would be one more user of the memory, and autograd
    counts users.
    """
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + count * tensor.element_size()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(),
        other.dtype,
        other.shape,
        other.stride(),
    )


def _pairs(targets: Sequence[Any], result: Any) -> Pairs:
    results = list(result) if isinstance(result, tuple) and len(targets) > 1 else [result]
    pairs: Pairs = []
    for target, source in zip(targets, results, strict=True):
        if isinstance(target, list | tuple):
            pairs += zip(target, source, strict=True)
        elif isinstance(source, torch.Tensor):
            pairs.append((target, source))
        else:
            raise TypeError(f"the kernel returned {type(source).__name__}, not a tensor")
    return pairs


def _check_castable(target: torch.Tensor, source: torch.Tensor) -> None:
    if not torch.can_cast(source.dtype, target.dtype):
        raise RuntimeError(f"result type {source.dtype} can't be cast to the desired output type {target.dtype}")
