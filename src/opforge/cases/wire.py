"""Encode arguments as a JSON tree for the wire, and decode them to torch values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from opforge.cases.text import parse_arguments
from opforge.cases.values import DTYPES, SHORT_NAMES, Device, Dtype, Layout, MemoryFormat, TensorSpec, Value

TORCH_DTYPES: dict[str, torch.dtype] = {
    short: getattr(torch, name) for short, (name, _) in DTYPES.items() if hasattr(torch, name)
}
SHORT_DTYPES: dict[torch.dtype, str] = {dtype: short for short, dtype in TORCH_DTYPES.items()}


def encode(value: Value, tensor_row: Callable[[TensorSpec], list[Any]]) -> Any:
    """Return a JSON tree; ``tensor_row`` returns the wire row of a tensor. Tuples become lists."""
    match value:
        case TensorSpec():
            return {"T": tensor_row(value)}
        case list() | tuple():
            return [encode(v, tensor_row) for v in value]
        case Dtype(short):
            return {"dtype": short}
        case Layout(name) | MemoryFormat(name):
            return {"torch": name}
        case Device(name):
            return {"device": name}
        case complex():
            return {"complex": [value.real, value.imag]}
        case _:
            return value


def json_tree(args: str) -> str:
    """Return the JSON tree of a text form. A suite may store it, to avoid parsing again."""
    positional, named = parse_arguments(args)
    return json.dumps([encode(list(positional), spec_row), {n: encode(v, spec_row) for n, v in named.items()}])


def spec_row(spec: TensorSpec) -> list[Any]:
    """Return a tensor's row without a place yet: offset in the blob, geometry, seeded range."""
    row = [spec.at, spec.storage_nbytes, spec.dtype, list(spec.shape), list(spec.strides), spec.offset, spec.device]
    return row if spec.low is None and spec.high is None else [*row, spec.low, spec.high]


def decode(tree: Any, make_tensor: Callable[[list[Any]], torch.Tensor]) -> Any:
    """Return the torch value of a JSON tree; ``make_tensor`` makes a tensor from its row."""
    if isinstance(tree, list):
        return [decode(v, make_tensor) for v in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "T":
            return make_tensor(content)
        case "dtype":
            return TORCH_DTYPES[content]
        case "torch":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "complex":
            return complex(*content)
    raise ValueError(f"unknown kind of value {kind!r} on the wire")


def from_torch(value: Any, tensor_spec: Callable[[torch.Tensor], TensorSpec]) -> Value:
    """Return an argument of a real call as data; raise TypeError if a case cannot hold it."""
    match value:
        case torch.Tensor():
            return tensor_spec(value)
        case None | bool() | int() | float() | complex() | str():
            return value
        case tuple():
            return tuple(from_torch(v, tensor_spec) for v in value)
        case list():
            return [from_torch(v, tensor_spec) for v in value]
        case torch.dtype():
            name = str(value).removeprefix("torch.")
            if name in SHORT_NAMES:
                return Dtype(SHORT_NAMES[name])
        case torch.layout():
            return Layout(str(value).removeprefix("torch."))
        case torch.memory_format():
            return MemoryFormat(str(value).removeprefix("torch."))
        case torch.device():
            return Device(str(value))
    raise TypeError(f"a case cannot hold a {type(value).__name__}")
