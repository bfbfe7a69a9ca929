"""Run a model in float64 throughout.

Dtypes that it requests by name are widened. Random draws stay those of the narrow run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.judge.reference.aten import wide_dtype, widen, widen_dtypes
from opforge.runtime.trees import map_instances

_DEFAULT_DTYPE = torch.float32
_INTEGER_DRAWS = ("randint", "randperm")


class WideningMode(TorchDispatchMode):
    """Widens every requested dtype, so that nothing is rounded in between."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler when the first mode is made, which takes seconds

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self._narrow = narrow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn(func, args, kwargs)
        result = func(*widen_dtypes(list(args)), **widen_dtypes(kwargs))
        return widen(result) if func is torch.ops.aten.lift_fresh.default else result

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw the narrow run's numbers and widen them."""
        if not _tensors([*args, *kwargs.values()]) and not func.__name__.startswith(_INTEGER_DRAWS):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or _DEFAULT_DTYPE}
        if func is torch.ops.aten.native_dropout.default:
            _result, mask = func(*map_instances(args, torch.Tensor, self._narrowed), **kwargs)
            dropout = args[1]
            return args[0] * mask * (1 / (1 - dropout) if dropout < 1 else 0.0), mask
        # torch has no public name for an operator's schema
        written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}  # noqa: SLF001
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs  # noqa: SLF001
        narrowed = {n: map_instances(v, torch.Tensor, self._narrowed) for n, v in given.items()}
        result = (
            func(**narrowed)
            if len(given) == len(kwargs)
            else func(*list(narrowed.values())[: len(args)], **{n: narrowed[n] for n in kwargs})
        )
        for name in written:
            given[name].copy_(narrowed[name])
        return given[written.pop()] if len(written) == 1 else map_instances(result, torch.Tensor, widen)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._narrow) if tensor.dtype == torch.float64 else tensor.clone()


def has_wider_dtype(dtype: torch.dtype) -> bool:
    """Whether there is a wider dtype, in which a model of this dtype is exact."""
    return wide_dtype(dtype) is not None


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]
