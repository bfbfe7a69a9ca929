"""ATen's own kernels, held while something else stands in their place, and how something is put there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from .facts import Signature, qualified

NUMBERS = (bool, int, float, complex)


def original_of(op: Signature, key: str) -> Callable[..., Any]:
    """Return ATen's kernel of an operator for one dispatch key, as it is now; calling it passes by whatever comes later."""
    kernel = torch.library.get_kernel(f"aten::{qualified(op.name)}", key)
    boxed = functools.partial(kernel.call_boxed, DispatchKeySet(getattr(DispatchKey, key)))
    tensors = tuple(i for i, a in enumerate(op.arguments) if a.type.startswith("Tensor"))
    if len(tensors) <= 1:
        return boxed

    def call(*args: Any, **kwargs: Any) -> Any:
        for i in tensors:
            if i < len(args) and args[i].__class__ in NUMBERS:
                return boxed(*_with_tensors(args, tensors), **kwargs)
        return boxed(*args, **kwargs)

    return call


def device_key(device: str) -> str:
    """Return the dispatch key of a device such as ``cpu`` or ``cuda:1``."""
    return "CPU" if device.partition(":")[0] == "cpu" else "CUDA"


def put(library: Any, op: Signature, function: Callable[..., Any], key: str) -> None:
    """Put a function in the place of ATen's kernel, until the library is destroyed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something was there before is the point
        library.impl(qualified(op.name), function, key, allow_override=True)


def registrations(op: Signature) -> str:
    """Return all that is registered for an operator, in torch's own words."""
    dump: str = torch._C._dispatch_dump(f"aten::{qualified(op.name)}")  # noqa: SLF001  # torch has no public name for it
    return dump


def _with_tensors(args: tuple[Any, ...], tensors: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with plain numbers that stand for tensors turned into tensors, as the boxed call wants them."""
    like = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if like is None:
        return args
    changed, dtype, whole = list(args), like.dtype, like.dim() == 0
    for i in tensors:
        if i < len(args) and args[i].__class__ in NUMBERS:
            changed[i] = _number(args[i], args[i].__class__, dtype, whole)
    return tuple(changed)


@functools.lru_cache(maxsize=256)
def _number(value: Any, _class: type, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Return a number as a tensor of the dtype that it has beside a tensor of another, which has no dimensions or some; it is only read."""
    with torch.inference_mode(mode=False):
        like = torch.empty(() if whole else 1, dtype=dtype)
        return torch.tensor(value, dtype=torch.result_type(like, value))
