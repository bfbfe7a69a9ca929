"""ATen's own kernels, held while something else stands in their place, and how something is put there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from .facts import Signature, qualified

_NUMBERS = (bool, int, float, complex)


class Original:
    """ATen's kernel of an operator for one dispatch key, as it is when this is made; calling it passes by whatever comes later."""

    def __init__(self, op: Signature, key: str) -> None:
        self._kernel = torch.library.get_kernel(f"aten::{qualified(op.name)}", key)
        self._keys = DispatchKeySet(getattr(DispatchKey, key))
        self._tensors = frozenset(i for i, a in enumerate(op.arguments) if a.type.startswith("Tensor"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel.call_boxed(self._keys, *_with_tensors(args, self._tensors), **kwargs)


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


def _with_tensors(args: tuple[Any, ...], tensors: frozenset[int]) -> list[Any]:
    """Return arguments with plain numbers that stand for tensors turned into tensors, as the boxed call wants them."""
    given = list(args)
    like = next((a for a in given if isinstance(a, torch.Tensor)), None)
    for i, value in enumerate(given):
        if i in tensors and isinstance(value, _NUMBERS) and like is not None:
            given[i] = torch.tensor(value, dtype=torch.result_type(like, value))
    return given
