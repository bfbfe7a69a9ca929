"""Other numbers than ATen's, for a kernel that calls what it may not call: its answer is wrong if it depends on them."""

from __future__ import annotations

import secrets
from typing import Any

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UPPER_BITS = {
    torch.float64: 50, torch.float32: 21, torch.float16: 8, torch.bfloat16: 5, torch.complex64: 21, torch.complex128: 50,
}  # fmt: skip
"""Of floating-point numbers: where the upper bits of the mantissa begin, so that every number becomes quite another."""


def spoiled(result: Any, given: list[torch.Tensor], *, mutates: bool) -> Any:
    """Return what an operator answered with other numbers in it, written in place where the operator writes.

    Raises RuntimeError where the numbers cannot be reached.
    """
    if isinstance(result, list | tuple):
        return type(result)(spoiled(r, given, mutates=mutates) for r in result)
    if not isinstance(result, torch.Tensor):
        return result if isinstance(result, bool) or not isinstance(result, int | float) else result + 1 + result
    if result.layout != torch.strided or result.is_quantized or result.is_nested:
        raise RuntimeError("ATen's own operator is not to be had in a kernel's process")
    if not mutates and any(_shares(result, t) for t in given):
        result = result.clone()
    _change(result)
    return result


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def _change(tensor: torch.Tensor) -> None:
    """Flip bits of every element; which ones nobody knows before."""
    if not tensor.numel() or tensor.is_meta:
        return
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
        return
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    shift = _UPPER_BITS.get(tensor.dtype, 0)
    mask = (1 + secrets.randbelow(3)) << shift
    real.view(_INTEGERS[real.element_size()]).bitwise_xor_(mask)
