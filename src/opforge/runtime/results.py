"""Checks of a kernel's results.

Their types are always checked against the schema. Where nothing is proven, their dtypes, shapes and
devices are checked against a run on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .operator_schema import SchemaLike
from .trees import leaves, map_instances

Function = Callable[..., Any]
ResultSpecs = list[tuple[torch.dtype, torch.Size, torch.device | None] | None]
"""Dtype, shape and device of each tensor of a result; None for an absent tensor.

The device is None if it is not known.
"""
_MAY_RETURN_NONE = frozenset({"mkldnn_rnn_layer.default"})
"""Operators without an output mask that may return None for a result.

This one has a workspace only for a backward pass.
"""
_MAX_CACHED_CALLS = 1024
"""Calls whose expected results are cached. A full cache is emptied."""


def check_result_types(op: SchemaLike, result: Any) -> None:
    """Raise TypeError for results that do not have the types of the schema.

    The dispatcher would accept them, or end the process.
    """
    expected = op.returns
    results = (result,) if len(expected) == 1 else result
    if not expected:
        if result is not None:
            raise TypeError(f"a kernel for {op.name} returned {type(result).__name__}; the operator returns nothing")
        return
    if not isinstance(results, tuple | list) or len(results) != len(expected):
        raise TypeError(f"a kernel for {op.name} returned {type(result).__name__}, not {len(expected)} results")
    masked = op.name in _MAY_RETURN_NONE or any(argument.name == "output_mask" for argument in op.arguments)
    for value, slot in zip(results, expected, strict=True):
        is_list = slot.type.startswith("Tensor[")
        if value is None and masked:  # torch's own value for a result that was not requested
            continue
        if slot.type == "Tensor" and not isinstance(value, torch.Tensor):
            raise TypeError(f"a kernel for {op.name} returned {type(value).__name__}, not a tensor")
        if is_list and not (isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value)):
            raise TypeError(f"a kernel for {op.name} returned {type(value).__name__}, not a list of tensors")


class ResultCheck:
    """Compares results of a functional operator with a run on the meta device, which it caches."""

    def __init__(self, op: SchemaLike) -> None:
        self._op = op
        base, _, overload = op.name.partition(".")
        self._function = getattr(getattr(torch.ops.aten, base), overload)
        self._expected: dict[Any, ResultSpecs | None] = {}

    def wrap(self, function: Function) -> Function:
        """Wrap a function so that its results are checked."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.check(result, args, kwargs)
            return result

        return call

    def check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError if dtype, shape or device of a result cannot be the operator's.

        Call it only inside a kernel, where operators are ATen's own.
        """
        check_result_types(self._op, result)
        key = (_key([*args, *kwargs.items()]), torch.get_default_dtype())
        if key not in self._expected:
            if len(self._expected) >= _MAX_CACHED_CALLS:
                self._expected.clear()
            self._expected[key] = self._expected_from_meta(args, kwargs)
        expected = self._expected[key]
        if expected is None or not self._mismatch(result, expected):
            return
        self._expected[key] = expected = _specs_of(self._function(*args, **kwargs))  # the meta device may differ
        if wrong := self._mismatch(result, expected):
            raise TypeError(f"a kernel for {self._op.name} returned {wrong}")

    def _mismatch(self, result: Any, expected: ResultSpecs) -> str:
        """Say how a result differs from what is expected; empty if it does not."""
        tensors = _flat(result)
        if len(tensors) != len(expected):
            return f"{len(tensors)} tensors, not {len(expected)}"
        for tensor, like in zip(tensors, expected, strict=True):
            if tensor is None or like is None:
                if tensor is not like:
                    return "nothing, not a tensor" if tensor is None else "a tensor, not nothing"
                continue
            dtype, shape, device = like
            if tensor.dtype != dtype:
                return f"{tensor.dtype}, not {dtype}"
            if tensor.shape != shape:
                return f"the shape {list(tensor.shape)}, not {list(shape)}"
            if device is not None and _on_other_device(tensor.device, device):
                return f"a tensor on {tensor.device}, not {device}"
        return ""

    def _expected_from_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResultSpecs | None:
        tensors = [t for t in _flat([*args, *kwargs.values()]) if t is not None]
        if not tensors and kwargs.get("device") is None:  # the result would be on the default device
            return None
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        result_device = device or next((t.device for t in tensors if t.dim()), None)
        try:
            result = self._function(*_to_meta(args), **_to_meta(kwargs))
            return [None if t is None else (t.dtype, t.shape, result_device) for t in _flat(result)]
        except Exception:  # noqa: BLE001  # data-dependent results, device arguments: unknown
            return None


def _on_other_device(device: torch.device, expected: torch.device) -> bool:
    return device.type != expected.type or (expected.index is not None and device.index != expected.index)


def _specs_of(result: Any) -> ResultSpecs:
    return [None if t is None else (t.dtype, t.shape, t.device) for t in _flat(result)]


def _to_meta(tree: Any) -> Any:
    tensors_moved = map_instances(
        tree, torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )
    return map_instances(tensors_moved, torch.device, lambda _: torch.device("meta"))


def _flat(tree: Any) -> list[torch.Tensor | None]:
    return [leaf for leaf in leaves(tree) if leaf is None or isinstance(leaf, torch.Tensor)]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), repr(value)
