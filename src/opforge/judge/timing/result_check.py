"""Compare what the judge read from a stopped worker's memory with what the worker reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opforge.cases.tensors import Bytes, flat_bytes
from opforge.cases.wire import TORCH_DTYPES
from opforge.judge.replies import MALFORMED_REPLY
from opforge.judge.verdict import RejectedError, VerdictKind
from opforge.sandbox.guest.cpu_timed_calls import double_bits


def spanned_elements(shape: Any, strides: Any) -> int:
    """Return the number of elements of memory that a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def leaves(tree: Any) -> list[Any]:
    """Return the tensors and numbers of a reply, in order."""
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree] if isinstance(tree, bool | int | float) or (isinstance(tree, dict) and "T" in tree) else []


def matches_report(part: bytearray | int | None, reported: Any, results: Bytes, base_offset: int) -> bool:
    """Whether a part of a result read from a stopped worker equals the worker's later report."""
    if part is None:
        return True
    if isinstance(part, int):
        return isinstance(reported, bool | int | float) and part == double_bits(reported)
    try:
        start, nbytes, short, shape, strides, *_ = reported["T"]
        dtype = TORCH_DTYPES[short]
        if spanned_elements(shape, strides) * dtype.itemsize > len(part) or any(step < 0 for step in strides):
            return False
        if not part:
            return not nbytes
        tensor = torch.frombuffer(part, dtype=dtype).as_strided(shape, strides)
        return bool(np.array_equal(flat_bytes(tensor).numpy(), results[start - base_offset :][:nbytes]))
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise RejectedError(VerdictKind.CONTRACT, MALFORMED_REPLY) from None
