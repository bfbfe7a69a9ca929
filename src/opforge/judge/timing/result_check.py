"""Compare what the judge read from a stopped worker's memory with what the worker reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opforge.cases.tensors import Bytes, flat_bytes
from opforge.cases.wire import TORCH_DTYPES
from opforge.runtime.trees import leaves
from opforge.sandbox.guest.cpu_timed_calls import double_bits
from opforge.sandbox.host.reply import MalformedReplyError, ReportedTensor, Returned


def spanned_elements(shape: Any, strides: Any) -> int:
    """Return the number of elements of memory that a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def reported_parts(returned: Returned) -> list[ReportedTensor | float]:
    """Return the tensors and numbers of a reported result, in order."""
    return [leaf for leaf in leaves(returned) if isinstance(leaf, bool | int | float | ReportedTensor)]


def matches_report(
    part: bytearray | int | None, reported: ReportedTensor | float, results: Bytes, base_offset: int
) -> bool:
    """Whether a part of a result read from a stopped worker equals the worker's later report."""
    if part is None:
        return True
    if isinstance(part, int):
        return not isinstance(reported, ReportedTensor) and part == double_bits(reported)
    if not isinstance(reported, ReportedTensor):
        raise MalformedReplyError
    dtype, shape, strides = TORCH_DTYPES[reported.dtype], reported.shape, reported.strides
    if spanned_elements(shape, strides) * dtype.itemsize > len(part) or any(step < 0 for step in strides):
        return False
    if not part:
        return not reported.nbytes
    try:
        tensor = torch.frombuffer(part, dtype=dtype).as_strided(shape, strides)
    except (TypeError, ValueError, RuntimeError):
        raise MalformedReplyError from None
    elements = results[reported.start - base_offset :][: reported.nbytes]
    return bool(np.array_equal(flat_bytes(tensor).numpy(), elements))
