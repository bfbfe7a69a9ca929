"""What ATen leaves in new memory is not asked of kernels; what it answers is."""

from __future__ import annotations

import pytest
import torch

from opforge.cases.wire import SHORT_DTYPES
from opforge.judge.compare.uninitialised import uninitialised_elements
from opforge.judge.reference.aten import ReferenceCall

LARGEST = torch.iinfo(torch.int64).max


def call(op: str, *args: object, **kwargs: object) -> ReferenceCall:
    return ReferenceCall(op, list(args), kwargs, memoryview(bytearray(64)), torch.device("cpu"), owns_storage=True)


@pytest.mark.parametrize(
    ("dtype", "poison", "count"),
    [("int64", LARGEST, 512), ("float32", float("nan"), 10 << 20), ("bfloat16", float("nan"), 20 << 20)],
)
def test_what_an_earlier_poisoned_call_left_in_memory_is_no_answer(dtype, poison, count):
    """Floats are many here: in small pieces of free memory an allocator has pointers of its own, some of which are NaN."""
    empty = call("empty.memory_format", [count], dtype={"dtype": SHORT_DTYPES[getattr(torch, dtype)]})
    found = torch.full((count,), poison, dtype=getattr(torch, dtype))
    undefined = uninitialised_elements(empty, found, 0, may_be_nan=False)
    assert undefined is not None
    assert undefined.all()


@pytest.mark.parametrize(("dtype", "answer"), [("int64", LARGEST), ("float32", float("nan")), ("int64", 7)])
def test_an_answer_is_one_though_it_looks_like_poison(dtype, answer):
    full = call("full.default", [512], answer, dtype={"dtype": SHORT_DTYPES[getattr(torch, dtype)]})
    found = torch.full((512,), answer, dtype=getattr(torch, dtype))
    undefined = uninitialised_elements(full, found, 0, may_be_nan=False)
    assert undefined is not None
    assert not undefined.any()
