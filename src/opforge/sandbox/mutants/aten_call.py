"""One call of ATen that can be repeated with a change. Mutants are made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opforge.cases.tensors import owned_copy
from opforge.ops import Operator, SchemaKind
from opforge.runtime.trees import instances, leaves, map_instances

Function = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The outcome of a call: new values in the order of the result, and the written tensors."""

    new_values: list[Any]
    written: list[torch.Tensor]

    @property
    def values(self) -> list[Any]:
        return [*self.new_values, *self.written]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [v for v in self.values if isinstance(v, torch.Tensor)]

    def map(self, change: Callable[[Any], Any]) -> CallResult:
        return CallResult([change(v) for v in self.new_values], [change(v) for v in self.written])


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A function, its arguments as they were before the call, and its true answer."""

    op: Operator
    function: Function
    args: list[Any]
    kwargs: dict[str, Any]
    truth: CallResult = field(default_factory=lambda: CallResult([], []))
    rng: torch.Tensor | None = None
    view: bool = False
    """Whether the call returns a view of an input, by its schema or in fact."""

    def repeat(self, change: Change | None = None) -> CallResult | None:
        """Call again, with every input tensor changed; None if ATen rejects that."""
        if change is not None and all(change(t) is t for t in self.inputs):
            return self.truth
        copy = _same if self.view else owned_copy  # some operators write to inputs without declaring it
        inner = copy if change is None else lambda t: change(copy(t))
        out = set() if self.op.kind is not SchemaKind.OUT else {a.name for a in self.op.arguments if a.writes}
        args = [map_instances(v, torch.Tensor, inner) for v in self.args]
        kwargs = {n: map_instances(v, torch.Tensor, copy if n in out else inner) for n, v in self.kwargs.items()}
        return self.call(args, kwargs)

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CallResult | None:
        """Call with exactly these arguments, and the same random state; None if ATen raises."""
        if self.rng is not None:
            torch.set_rng_state(self.rng)
        try:
            result = self.function(*args, **kwargs)
        except Exception:  # noqa: BLE001  # ATen raises many types; only the fact counts
            return None
        return result_of(self.op, result, args, kwargs)

    def with_arguments(self, args: list[Any], kwargs: dict[str, Any]) -> AtenCall | None:
        """Return the call with other arguments and its true answer; None if ATen raises."""
        blank = replace(self, args=args, kwargs=kwargs)
        truth = blank.repeat()
        return None if truth is None else replace(blank, truth=truth)

    def written_before(self) -> list[torch.Tensor]:
        """Return the tensors to be written, as they were before the call."""
        return result_of(self.op, None, self.args, self.kwargs).written

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the arguments, except ``out`` tensors that are only written."""
        skipped = {a.name for a in self.op.arguments if a.writes} if self.op.kind is SchemaKind.OUT else set()
        named = (v for n, v in self.kwargs.items() if n not in skipped)
        return [*instances([self.args, named], torch.Tensor)]


def result_of(op: Operator, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> CallResult:
    """Return the outcome of a call, with written tensors separate from new values."""
    given = {**dict(zip((a.name for a in op.arguments), args, strict=False)), **kwargs}
    names = [a.name for a in op.arguments if a.writes and a.name in given]
    written = [*instances([given[n] for n in names], torch.Tensor)]
    fresh = [v for v in leaves(result) if not any(v is w for w in written)]
    return CallResult(fresh, written)


def copy_arguments(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as they are now, copied if the call will write to them."""
    copy = owned_copy if op.mutates else _same
    return [map_instances(v, torch.Tensor, copy) for v in args], {
        n: map_instances(v, torch.Tensor, copy) for n, v in kwargs.items()
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
