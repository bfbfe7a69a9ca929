"""What a result must be like: held against the schema always, and against a run without contents where nothing is proven."""

from __future__ import annotations

from typing import Any

import torch

from .facts import Signature


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
    for value, wanted in zip(found, expected, strict=True):
        is_list = wanted.type.startswith("Tensor[")
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
        self._known: dict[Any, list[tuple[torch.dtype, torch.Size]] | None] = {}

    def check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError where dtype, shape or device of a result cannot be the operator's."""
        expected = self._expected(args, kwargs)
        if expected is None:
            return
        found = _flat(result)
        if len(found) != len(expected):
            raise TypeError(f"a kernel for {self._op.name} returned {len(found)} tensors, not {len(expected)}")
        device = next((t.device for t in _flat([*args, *kwargs.values()]) if t.dim()), None)
        for tensor, (dtype, shape) in zip(found, expected, strict=True):
            if tensor.dtype != dtype:
                raise TypeError(f"a kernel for {self._op.name} returned {tensor.dtype}, not {dtype}")
            if tensor.shape != shape:
                raise TypeError(
                    f"a kernel for {self._op.name} returned the shape {list(tensor.shape)}, not {list(shape)}"
                )
            if device is not None and tensor.device != device:
                raise TypeError(f"a kernel for {self._op.name} returned a tensor on {tensor.device}, not {device}")

    def _expected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.dtype, torch.Size]] | None:
        key = _key([*args, *kwargs.items()])
        if key not in self._known:
            self._known[key] = self._without_contents(args, kwargs)
        return self._known[key]

    def _without_contents(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.dtype, torch.Size]] | None:
        try:
            result = self._function(*_meta(args), **{name: _meta(value) for name, value in kwargs.items()})
        except Exception:  # noqa: BLE001  # results that depend on contents, devices among the arguments: nothing is known
            return None
        return [(t.dtype, t.shape) for t in _flat(result)]


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(map(_meta, value))
    return torch.device("meta") if isinstance(value, torch.device) else value


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _flat(v)] if isinstance(value, list | tuple) else []


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), repr(value)
