"""Record the calls of a model's operators, to run each by itself. Only the child does this.

In a model, the errors of later operators may hide those of earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.edge.program_inputs import flatten, value_text
from opforge.runtime.trees import instances, map_instances

_MAX_CALLS = 64
"""Calls of one program."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an operator, with copies of its tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(instances((self.args, self.kwargs), torch.Tensor))

    def results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the operator with other tensors."""
        remaining = iter(tensors)
        args, kwargs = map_instances((self.args, self.kwargs), torch.Tensor, lambda _old: next(remaining))
        return flatten(self.op(*args, **kwargs))

    def __str__(self) -> str:
        arguments = [*map(value_text, self.args)]
        arguments += [f"{name}={value_text(value)}" for name, value in self.kwargs.items()]
        return f"{self.op.name().partition('.')[0]}({', '.join(arguments)})"


class OperatorCalls(torch.nn.Module):
    """Makes recorded calls, each from inputs of its own."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        super().__init__()
        self.calls = tuple(calls)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for call in self.calls for tensor in call.tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results of all calls."""
        remaining = iter(tensors)
        return tuple(result for call in self.calls for result in call.results([next(remaining) for _ in call.tensors]))

    def call_of(self, result: int) -> RecordedCall:
        """Return the call that gives a result."""
        owners = [call for call in self.calls for _ in call.results(call.tensors)]
        return owners[result]


class CallRecorder(TorchDispatchMode):
    """Records calls of some operators, and counts those of all."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.count = 0
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        if func.name().partition(".")[0] in self._names:
            copied = map_instances((args, kwargs or {}), torch.Tensor, lambda t: t.detach().clone())
            self.calls.append(RecordedCall(func, *copied))
        return func(*args, **(kwargs or {}))


def distinct_calls(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the first calls of each operator with each shape, dtype and number."""
    return list({str(call): call for call in reversed(calls)}.values())[:_MAX_CALLS]
