"""Noise instead of ATen's numbers, to make kernels that call forbidden operators wrong."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import torch


def replace_by_noise(result: Any, inputs: list[torch.Tensor], *, mutates: bool) -> Any:
    """Replace the numbers of an operator's result by noise, in place if the operator writes.

    Nothing of ATen's answer is left, however often it is called. Raises RuntimeError if the numbers
    cannot be reached.
    """
    if isinstance(result, list | tuple):
        noise = []
        for one in result:  # a comprehension adds a stack frame
            noise.append(replace_by_noise(one, inputs, mutates=mutates))  # noqa: PERF401
        return type(result)(noise)
    if isinstance(result, bool):
        return bool(secrets.randbelow(2))
    if isinstance(result, int | float | complex):
        return type(result)(1 + secrets.randbelow(1000))
    if not isinstance(result, torch.Tensor) or result.is_meta:
        return result
    if result.layout != torch.strided or result.is_quantized or result.is_nested:
        raise RuntimeError("ATen's own operator is not available in a kernel's process")
    if not mutates and any(_shares(result, t) for t in inputs):
        result = result.clone()
    return result.copy_(_noise(result.numel()).reshape(result.shape))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def _noise(count: int) -> torch.Tensor:
    """Return numbers between 1 and 4, without advancing torch's generator."""
    drawn = np.random.default_rng(secrets.randbits(64)).uniform(1, 4, count)
    return torch.from_numpy(drawn)
