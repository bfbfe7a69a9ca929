"""Names of folders, calls as text, errors between results."""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from BackendBench.opregistry import get_operator
from opforge.cases.text import parse_arguments
from opforge.cases.values import Device, Dtype, Layout, MemoryFormat, TensorSpec
from opforge.cases.wire import SHORT_DTYPES, TORCH_DTYPES

_SEPARATOR = "__"
_Error = tuple[float | None, float | None]


def op_name_to_folder_name(op_name: str) -> str:
    """Return the folder of an operator: ``add__Tensor`` for ``add.Tensor``."""
    return op_name.replace(".", _SEPARATOR)


def folder_name_to_op_name(folder_name: str) -> str:
    """Return the operator of a folder: ``add_.Tensor`` for ``add___Tensor``."""
    return folder_name[::-1].replace(_SEPARATOR, ".")[::-1]


def is_overload_folder_name(folder_name: str) -> bool:
    """Whether a folder is for one overload."""
    return _SEPARATOR in folder_name


def extract_operator_name(op_str: str) -> str:
    """Return what follows ``aten.`` in an operator's text."""
    return op_str.rpartition("aten.")[2]


def get_pytorch_op(op_name: str) -> Any:
    """Return torch's operator of a name, or None with a warning."""
    return get_operator(op_name)


def serialize_args(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
    """Return a call as text: tensors by shape, dtype and, where needed, stride."""
    if args is None or kwargs is None:
        return "None"
    positional = "".join(f"{_text(value)}, " for value in args).removesuffix(" ")
    named = ", ".join(f"{name!r}: {_text(value)}" for name, value in kwargs.items())
    return f"(({positional}), {{{named}}})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        stride = "" if value.is_contiguous() else f", {list(value.stride())}"
        return f"T({list(value.shape)}, {SHORT_DTYPES[value.dtype]}{stride})"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else repr(value)


def deserialize_args(inps: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call of a text, with random tensors: on the GPU if there is one and the text names no device.

    The text is parsed and never evaluated.
    """
    args, kwargs = parse_arguments(inps)
    return tuple(map(_value, args)), {name: _value(value) for name, value in kwargs.items()}


def _value(value: Any) -> Any:
    match value:
        case TensorSpec():
            return _deserialize_tensor(value.shape, TORCH_DTYPES[value.dtype], value.stride, value.device or "cuda")
        case tuple() | list():
            return type(value)(map(_value, value))
        case Dtype(short):
            return TORCH_DTYPES[short]
        case Layout(name) | MemoryFormat(name):
            return getattr(torch, name)
        case Device(name):
            return torch.device(name)
    return value


def _deserialize_tensor(
    size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, device: str = "cuda"
) -> torch.Tensor:
    """Return a random tensor; floating-point numbers are in [0, 1]."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        device = "cpu"
    bounds = {"low": 0, "high": 1} if dtype.is_floating_point else {}
    if stride is None:
        return torch.testing.make_tensor(tuple(size), dtype=dtype, device=device, **bounds)
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    return torch.testing.make_tensor(reach, dtype=dtype, device=device, **bounds).as_strided(size, stride)


def compute_errors(ref: Any, res: Any, eps: float = 1e-10) -> _Error:
    """Return the largest absolute and relative error; None for what cannot be subtracted."""
    if isinstance(ref, torch.Tensor) and isinstance(res, torch.Tensor):
        if ref.shape != res.shape or ref.is_sparse or res.is_sparse:
            return None, None
        if not ref.numel():
            return 0.0, 0.0
        exact = ref.to(torch.complex128 if ref.is_complex() else torch.float64)
        error = (exact - res.to(exact.dtype)).abs()
        return error.max().item(), (error / (exact.abs() + eps)).max().item()
    if not (isinstance(ref, list | tuple) and isinstance(res, list | tuple) and len(ref) == len(res)):
        return None, None
    known = [pair for pair in map(compute_errors, ref, res) if pair[0] is not None]
    return (max(e for e, _ in known), max(e for _, e in known)) if known else (None, None)


def uses_cuda_stream(func: Any) -> bool:
    """Whether a function's source makes a CUDA stream. opforge's judge waits for all streams anyway."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(func)))
    except (TypeError, OSError, SyntaxError):
        return False
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (getattr(called, "attr", getattr(called, "id", "")) for called in calls)
    return any(name.lower() in ("stream", "make_stream", "create_stream") for name in names)
