"""Other numbers than ATen's, for a kernel that calls what it may not call: its answer is wrong if it depends on them."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch


def spoiled(result: Any, given: list[torch.Tensor], *, mutates: bool) -> Any:
    """Return what an operator answered with noise in the place of its numbers, written in place where the operator writes.

    Nothing of ATen's answer is left in it, however often it is asked. Raises RuntimeError where the numbers cannot be reached.
    """
    if isinstance(result, list | tuple):
        noise = []
        for one in result:
            noise.append(spoiled(one, given, mutates=mutates))  # noqa: PERF401  # with no function in between, which traps look for
        return type(result)(noise)
    if isinstance(result, bool):
        return bool(secrets.randbelow(2))
    if isinstance(result, int | float | complex):
        return type(result)(1 + secrets.randbelow(1000))
    if not isinstance(result, torch.Tensor) or result.is_meta:
        return result
    if result.layout != torch.strided or result.is_quantized or result.is_nested:
        raise RuntimeError("ATen's own operator is not to be had in a kernel's process")
    if not mutates and any(_shares(result, t) for t in given):
        result = result.clone()
    return result.copy_(_noise(result.numel()).reshape(result.shape))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def _noise(count: int) -> torch.Tensor:
    """Return numbers between 1 and 4; torch's own generator must not be moved on by them."""
    drawn = np.random.default_rng(secrets.randbits(64)).uniform(1, 4, count)
    return torch.from_numpy(drawn)
