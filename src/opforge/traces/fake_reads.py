"""Answer 0 when a program reads a value of a fake tensor, which has none, and count it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

FAKE_READ_REASON = "_local_scalar_dense.default: the program read a value, which is unknown with --fake; 0 was used"


class FakeReads(TorchDispatchMode):
    """Answers reads that fake tensors cannot answer; entered after their mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler for the first mode, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001  # it has no public name
            return func(*args, **(kwargs or {}))
        try:
            return func(*args)
        except DataDependentOutputException:
            self.count += 1
            return _zero(args[0].dtype)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else 0
