"""One functional kernel serves its whole family: wrappers that give the in-place and out forms their contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .facts import FUNCTIONAL, INPLACE, OUT, Signature

Function = Callable[..., Any]


def adapt(function: Function, op: Signature, implements: Signature) -> Function:
    """Return a callable with the signature and contract of ``op``, made of a function that implements another form."""
    if op.form == implements.form:
        return function
    if implements.form == FUNCTIONAL and op.form == INPLACE:
        return _inplace(function, op)
    if implements.form == FUNCTIONAL and op.form == OUT:
        return _out(function, op)
    raise NotImplementedError(f"a kernel for {implements.name} ({implements.form}) cannot serve {op.name} ({op.form})")


def _inplace(function: Function, op: Signature) -> Function:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_overlap(self)
        result = function(self, *args, **kwargs)
        for target, source in _pairs([self], result):
            if source.shape != target.shape:
                raise RuntimeError(
                    f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(source.shape)}"
                )
            _copy(target, source)
        return self if op.returns else None

    return call


def _out(function: Function, op: Signature) -> Function:
    names = [a.name for a in op.arguments if a.writes]

    def call(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        for out in outs:
            _refuse_overlap(out)
        result = function(*args, **kwargs)
        for target, source in _pairs(outs, result):
            if source.shape != target.shape:
                target.resize_(source.shape)
            _copy(target, source)
        if not op.returns:
            return None
        return outs[0] if len(outs) == 1 else tuple(outs)

    return call


def _refuse_overlap(target: Any) -> None:
    """Raise, as ATen does, when something to be written holds several elements in one place."""
    for tensor in target if isinstance(target, list | tuple) else [target]:
        if tensor.numel() > 1 and any(
            size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise RuntimeError(
                "unsupported operation: more than one element of the written-to tensor refers to a single memory location"
            )


def _pairs(targets: Sequence[Any], result: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = list(result) if isinstance(result, tuple) and len(targets) > 1 else [result]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, results, strict=True):
        if isinstance(target, list | tuple):
            pairs += zip(target, source, strict=True)
        elif isinstance(source, torch.Tensor):
            pairs.append((target, source))
        else:
            raise TypeError(f"the kernel returned {type(source).__name__}, not a tensor")
    return pairs


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if not torch.can_cast(source.dtype, target.dtype):
        raise RuntimeError(f"result type {source.dtype} can't be cast to the desired output type {target.dtype}")
    target.copy_(source)
