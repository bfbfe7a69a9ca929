"""What a result must be like: held against the schema always, and against a run without contents where nothing is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .facts import Signature

Function = Callable[..., Any]
Like = list[tuple[torch.dtype, torch.Size, torch.device | None] | None]
"""Dtype, shape and device of each tensor of a result, the latter where it is known; None for one that is not there."""
_MAY_LACK = frozenset({"mkldnn_rnn_layer.default"})
"""Operators without a mask whose results are not all there: this one has a workspace for a backward pass alone."""
_MOST_KNOWN = 1024
"""Calls of which it is remembered what they return; with more of them all are forgotten."""


def check_kind(op: Signature, result: Any) -> None:
    """Refuse results that are not even of the kind that the schema says: the dispatcher would take them, or end the process."""
    expected = op.returns
    found = (result,) if len(expected) == 1 else result
    if not expected:
        if result is not None:
            raise TypeError(f"a kernel for {op.name} returned {type(result).__name__}; the operator returns nothing")
        return
    if not isinstance(found, tuple | list) or len(found) != len(expected):
        raise TypeError(f"a kernel for {op.name} returned {type(result).__name__}, not {len(expected)} results")
    masked = op.name in _MAY_LACK or any(argument.name == "output_mask" for argument in op.arguments)
    for value, wanted in zip(found, expected, strict=True):
        is_list = wanted.type.startswith("Tensor[")
        if value is None and masked:  # one that was not asked for: torch's own word for it
            continue
        if wanted.type == "Tensor" and not isinstance(value, torch.Tensor):
            raise TypeError(f"a kernel for {op.name} returned {type(value).__name__}, not a tensor")
        if is_list and not (isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value)):
            raise TypeError(f"a kernel for {op.name} returned {type(value).__name__}, not a list of tensors")


class Likeness:
    """Holds results of a functional operator against what it would return for tensors without contents; remembers what that was."""

    def __init__(self, op: Signature) -> None:
        self._op = op
        base, _, overload = op.name.partition(".")
        self._function = getattr(getattr(torch.ops.aten, base), overload)
        self._known: dict[Any, Like | None] = {}

    def checked(self, function: Function) -> Function:
        """Return a function whose results are looked at."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.check(result, args, kwargs)
            return result

        return call

    def check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError where dtype, shape or device of a result cannot be the operator's; to be called inside of a kernel."""
        check_kind(self._op, result)
        key = (_key([*args, *kwargs.items()]), torch.get_default_dtype())
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._without_contents(args, kwargs)
        expected = self._known[key]
        if expected is None or not self._unlike(result, expected):
            return
        self._known[key] = expected = _like(self._function(*args, **kwargs))  # which without contents may differ
        if wrong := self._unlike(result, expected):
            raise TypeError(f"a kernel for {self._op.name} returned {wrong}")

    def _unlike(self, result: Any, expected: Like) -> str:
        """Say what of a result is not as expected."""
        found = _flat(result)
        if len(found) != len(expected):
            return f"{len(found)} tensors, not {len(expected)}"
        for tensor, like in zip(found, expected, strict=True):
            if tensor is None or like is None:
                if tensor is not like:
                    return f"{'nothing' if tensor is None else 'a tensor'}, not {'nothing' if like is None else 'a tensor'}"
                continue
            dtype, shape, device = like
            if tensor.dtype != dtype:
                return f"{tensor.dtype}, not {dtype}"
            if tensor.shape != shape:
                return f"the shape {list(tensor.shape)}, not {list(shape)}"
            if device is not None and _elsewhere(tensor.device, device):
                return f"a tensor on {tensor.device}, not {device}"
        return ""

    def _without_contents(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Like | None:
        given = [t for t in _flat([*args, *kwargs.values()]) if t is not None]
        if not given and kwargs.get("device") is None:  # it would be made where tensors are made by default
            return None
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        where = device or next((t.device for t in given if t.dim()), None)
        try:
            found = self._function(*_meta(args), **{name: _meta(value) for name, value in kwargs.items()})
            return [None if t is None else (t.dtype, t.shape, where) for t in _flat(found)]
        except Exception:  # noqa: BLE001  # results that depend on contents, devices among the arguments: nothing is known
            return None


def _elsewhere(found: torch.device, wanted: torch.device) -> bool:
    return found.type != wanted.type or (wanted.index is not None and found.index != wanted.index)


def _like(result: Any) -> Like:
    return [None if t is None else (t.dtype, t.shape, t.device) for t in _flat(result)]


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(map(_meta, value))
    return torch.device("meta") if isinstance(value, torch.device) else value


def _flat(value: Any) -> list[torch.Tensor | None]:
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _flat(v)] if isinstance(value, list | tuple) else []


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), repr(value)
