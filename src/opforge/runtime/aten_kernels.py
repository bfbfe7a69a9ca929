"""Access to ATen's own kernels while they are overridden, and the override itself."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from .operator_schema import SchemaLike, dispatcher_name

NUMBER_TYPES = (bool, int, float, complex)
"""Plain numbers, from the lowest kind to the highest. A bool is also an int, so it is first."""
_WIDEST_DTYPES = (torch.bool, torch.int64, torch.float64, torch.complex128)


def aten_kernel(op: SchemaLike, key: str) -> Callable[..., Any]:
    """Return ATen's current kernel of an operator for one dispatch key.

    Calls to it bypass later overrides.
    """
    kernel = torch.library.get_kernel(f"aten::{dispatcher_name(op.name)}", key)
    boxed = functools.partial(kernel.call_boxed, DispatchKeySet(getattr(DispatchKey, key)))
    tensors = tuple(i for i, a in enumerate(op.arguments) if a.type in ("Tensor", "Tensor?"))

    def call(*args: Any, **kwargs: Any) -> Any:
        for i in tensors:
            if i < len(args) and isinstance(args[i], NUMBER_TYPES):
                return boxed(*_numbers_to_tensors(args, tensors), **kwargs)
        return boxed(*args, **kwargs)

    return call


def dispatch_key(device: str) -> str:
    """Return the dispatch key of a device such as ``cpu`` or ``cuda:1``."""
    return "CPU" if device.partition(":")[0] == "cpu" else "CUDA"


def override(library: Any, op: SchemaLike, function: Callable[..., Any], key: str) -> None:
    """Override ATen's kernel with a function, until the library is destroyed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the override, which is intended
        library.impl(dispatcher_name(op.name), function, key, allow_override=True)


def dispatcher_dump(op: SchemaLike) -> str:
    """Return torch's own dump of everything registered for an operator."""
    dump: str = torch._C._dispatch_dump(f"aten::{dispatcher_name(op.name)}")  # noqa: SLF001  # torch has no public one
    return dump


def _numbers_to_tensors(args: tuple[Any, ...], tensors: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with numbers for tensors turned into tensors, as boxed calls require."""
    like = next((a for a in args if isinstance(a, torch.Tensor)), None)
    changed = list(args)
    for i in tensors:
        if i < len(args) and isinstance(args[i], NUMBER_TYPES):
            changed[i] = _to_tensor(args[i], like)
    return tuple(changed)


def _to_tensor(value: Any, like: torch.Tensor | None) -> torch.Tensor:
    """Return a number as a tensor with the same type promotion beside ``like``."""
    other = (None, False) if like is None else (like.dtype, like.dim() == 0)
    if not value or (
        isinstance(value, complex) and not (value.real and value.imag)
    ):  # not cached: 0.0 and -0.0 are equal keys
        return _number_tensor(value, *other)
    return _cached_number_tensor(value, value.__class__, *other, torch.get_default_dtype())


def _number_tensor(value: Any, other_dtype: torch.dtype | None, zero_dim: bool) -> torch.Tensor:
    """Return a number as a tensor with the same type promotion. Callers only read it.

    A number affects the result's dtype only if it is of a higher kind. Beside tensors with
    dimensions, the same is true of 0-dim tensors, so the tensor has the widest dtype and keeps all
    digits. Without any other tensor, it has the default dtype.
    """
    kind = next(i for i, number_type in enumerate(NUMBER_TYPES) if isinstance(value, number_type))
    dtype = _widest_int_dtype(value) if kind == NUMBER_TYPES.index(int) else _WIDEST_DTYPES[kind]
    with torch.inference_mode(mode=False):
        if other_dtype is None and kind > NUMBER_TYPES.index(int):
            return torch.tensor(value, device="cpu")
        if other_dtype is not None and (zero_dim or kind > _kind(other_dtype)):
            dtype = torch.result_type(torch.empty(() if zero_dim else 1, dtype=other_dtype, device="cpu"), value)
            if kind == _kind(dtype) == NUMBER_TYPES.index(int):  # keep its lowest bits
                value = int(torch.tensor(value, dtype=_widest_int_dtype(value), device="cpu").to(dtype).item())
        return torch.tensor(value, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=256)
def _cached_number_tensor(
    value: Any, _class: Any, other_dtype: torch.dtype | None, zero_dim: bool, _default: torch.dtype
) -> torch.Tensor:
    return _number_tensor(value, other_dtype, zero_dim)


def _widest_int_dtype(value: int) -> torch.dtype:
    return torch.uint64 if value > torch.iinfo(torch.int64).max else torch.int64


def _kind(dtype: torch.dtype) -> int:
    """Return the index in ``NUMBERS`` of a dtype's kind."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1
