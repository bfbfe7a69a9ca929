"""A dispatched call as data: the geometry of its tensors, their bytes, and what a case cannot hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from opforge.cases.encoding import SHORT_DTYPES, encode, from_torch, spec_row
from opforge.cases.values import Arguments, TensorSpec, contiguous_strides
from opforge.ops import table


def as_data(args: Any, kwargs: dict[str, Any], tensor: Callable[[torch.Tensor], TensorSpec]) -> Arguments:
    """Return a call's arguments as data; raises TypeError on what a case cannot hold."""
    return tuple(from_torch(a, tensor) for a in args), {n: from_torch(v, tensor) for n, v in kwargs.items()}


def tree_text(data: Arguments) -> str:
    """Return the JSON tree of a call's arguments."""
    args, kwargs = data
    tree = [encode(list(args), spec_row), {n: encode(v, spec_row) for n, v in kwargs.items()}]
    return json.dumps(tree, separators=(",", ":"))


def geometry(value: torch.Tensor, home: str) -> TensorSpec:
    """Return a tensor without its contents; ``home`` is the type of the device recorded for: tensors elsewhere say where."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise TypeError(
            f"a case cannot hold a tensor of layout {value.layout}, dtype {value.dtype} on {value.device.type}"
        )
    if value.dtype not in SHORT_DTYPES:
        raise TypeError(f"a case cannot hold a tensor of dtype {value.dtype}")
    shape, strides = tuple(value.shape), tuple(value.stride())
    spec = TensorSpec(
        shape,
        SHORT_DTYPES[value.dtype],
        None if strides == contiguous_strides(shape) else strides,
        value.storage_offset() if value.numel() else 0,  # an empty view may point beyond its storage
        None if value.device.type == home else str(value.device),
    )
    if storage_size(value) < spec.storage_nbytes:
        raise TypeError("a case cannot hold a tensor that reaches beyond its storage")
    return spec


def storage_size(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage, as far as they are whole elements."""
    nbytes: int = value.untyped_storage().nbytes()
    return nbytes - nbytes % int(value.element_size())


def storage_bytes(value: torch.Tensor, nbytes: int) -> bytes:
    """Return the first bytes of a tensor's storage."""
    flat = value.detach().as_strided((nbytes // value.element_size(),), (1,), 0).cpu()
    contents: bytes = flat.view(torch.uint8).numpy().tobytes()
    return contents


def writes_to_overlap(op: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to a tensor in which several elements share a place."""
    facts = table().get(op)
    if facts is None or not facts.mutates:
        return False
    given = facts.bind(args, kwargs)
    return any(_overlaps(given.get(a.name)) for a in facts.arguments if a.writes)


def _overlaps(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_overlaps, value))
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.numel() < 2:
        return False
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def strange(result: Any) -> str:
    """Say what in a result cannot cross the border between processes, or nothing."""
    if isinstance(result, list | tuple):
        return next(filter(None, map(strange, result)), "")
    if not isinstance(result, torch.Tensor):
        return ""
    if result.layout != torch.strided or result.is_quantized or result.is_meta or result.dtype not in SHORT_DTYPES:
        return f"a tensor of layout {result.layout}, dtype {result.dtype}"
    return "a tensor without storage" if torch._is_zerotensor(result) else ""  # noqa: SLF001  # torch has no public test for it
