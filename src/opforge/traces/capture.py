"""A dispatched call as data: tensor geometry, tensor bytes, and what a case cannot hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opforge.cases.values import Arguments, TensorSpec, contiguous_strides
from opforge.cases.wire import SHORT_DTYPES, encode, from_torch, spec_row
from opforge.ops import table
from opforge.runtime.trees import instances

OVERLAPPING_WRITE = "writes to a tensor that overlaps itself, so its result depends on the order of writing"


def to_arguments(args: Any, kwargs: Mapping[str, Any], to_spec: Callable[[torch.Tensor], TensorSpec]) -> Arguments:
    """Return a call's arguments as data; raise TypeError for values that a case cannot hold."""
    return tuple(from_torch(a, to_spec) for a in args), {n: from_torch(v, to_spec) for n, v in kwargs.items()}


def arguments_json(data: Arguments) -> str:
    """Return the JSON tree of a call's arguments."""
    args, kwargs = data
    tree = [encode(list(args), spec_row), {n: encode(v, spec_row) for n, v in kwargs.items()}]
    return json.dumps(tree, separators=(",", ":"))


def spec_of(value: torch.Tensor, device_type: str) -> TensorSpec:
    """Return the geometry of a tensor, without its contents.

    ``device_type`` is that of the recording; a tensor on another device keeps its device.
    """
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
        None if value.device.type == device_type else str(value.device),
    )
    if storage_size(value) < spec.storage_nbytes:
        raise TypeError("a case cannot hold a tensor that reaches beyond its storage")
    return spec


def storage_size(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage, rounded down to whole elements."""
    nbytes: int = value.untyped_storage().nbytes()
    return nbytes - nbytes % int(value.element_size())


def storage_bytes(value: torch.Tensor, nbytes: int) -> bytes:
    """Return the first bytes of a tensor's storage."""
    flat = value.detach().as_strided((nbytes // value.element_size(),), (1,), 0).cpu()
    contents: bytes = flat.view(torch.uint8).numpy().tobytes()
    return contents


def writes_to_overlap(op: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes to a tensor with overlapping elements."""
    facts = table().get(op)
    if facts is None or not facts.mutates:
        return False
    given = facts.bind(args, kwargs)
    written = [given.get(a.name) for a in facts.arguments if a.writes]
    return any(map(_overlaps, instances(written, torch.Tensor)))


def _overlaps(value: torch.Tensor) -> bool:
    if value.layout != torch.strided or value.numel() < 2:
        return False
    span = 0
    for step, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if step <= span:
            return True
        span += step * (size - 1)
    return False


def unsendable_part(result: Any) -> str:
    """Return which part of a result cannot be sent between processes; empty if none."""
    for value in instances(result, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta or value.dtype not in SHORT_DTYPES:
            return f"a tensor of layout {value.layout}, dtype {value.dtype}"
        if torch._is_zerotensor(value):  # noqa: SLF001  # no public test for it
            return "a tensor without storage"
    return ""


def operator_name(func: Any) -> str:
    """Return an overload's full name; the namespace ``aten`` is omitted, as in ``add.Tensor``."""
    base = func.overloadpacket.__name__
    name = f"{base}.{func._overloadname}"  # noqa: SLF001  # torch has no public name for it
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"
