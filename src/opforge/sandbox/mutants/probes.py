"""Probes: variations of a case that expose a mutant.

A suite without a NaN must still notice that NaN is swallowed. So a mutant that changed nothing on a
case is tried on probes: the same call with other contents, layouts or arguments. If they expose
it, the suite is weak. If none does, the mutant is right there (swapped operands of a sum, for
example) and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opforge.cases.values import contiguous_strides
from opforge.kernels.mutants import IGNORED_PREFIX
from opforge.ops.arguments import other_values
from opforge.runtime.trees import map_instances
from opforge.sandbox.mutants.aten_call import AtenCall, Change
from opforge.sandbox.mutants.mutations import without_argument

Given = tuple[list[Any], dict[str, Any]]
Draw = Callable[[torch.Size, torch.Generator], torch.Tensor]
_MAX_PROBED_ELEMENTS = 1 << 20
"""Cases with more elements are not tried with other contents: the operator has smaller ones."""


def probes(call: AtenCall, mutant: str) -> Iterator[AtenCall]:
    """Yield calls that expose a mutant if it is wrong."""
    if sum(t.numel() for t in call.inputs) > _MAX_PROBED_ELEMENTS:
        return
    for args, kwargs in _probe_arguments(call, mutant):
        if (probe := call.with_arguments(args, kwargs)) is not None:
            yield probe


def _probe_arguments(call: AtenCall, mutant: str) -> Iterator[Given]:
    if mutant.startswith(IGNORED_PREFIX):
        yield from _other_values(call, mutant.removeprefix(IGNORED_PREFIX))
        return
    special = _SPECIAL.get(mutant)
    plain = [_drawn(draw) for draw in (_normal, _unit)]
    changes: list[Change] = plain if special is None else [special, *(_both(change, special) for change in plain)]
    for change in changes:
        yield (
            [map_instances(v, torch.Tensor, change) for v in call.args],
            {n: map_instances(v, torch.Tensor, change) for n, v in call.kwargs.items()},
        )


def _both(first: Change, second: Change) -> Change:
    return lambda tensor: second(first(tensor))


def _other_values(call: AtenCall, name: str) -> Iterator[Given]:
    """Yield the arguments with other values for one argument that has a default."""
    argument = next(a for a in call.op.arguments if a.name == name)
    args, kwargs = without_argument(call, name) or (call.args, call.kwargs)
    for value in other_values(argument):
        yield args, {**kwargs, name: torch.float64 if isinstance(value, dict) else value}


def _drawn(draw: Draw) -> Change:
    """Return a change that draws new numbers for a tensor. Integers stay: they may be positions."""
    generator = torch.Generator().manual_seed(0)  # shared by all tensors of a call, so that they differ

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=generator).lt(0.5).to(tensor.device)
        if tensor.is_complex():
            return torch.complex(draw(tensor.shape, generator), draw(tensor.shape, generator)).to(tensor)
        return draw(tensor.shape, generator).to(tensor) if tensor.is_floating_point() else tensor

    return change


def _normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=generator)


def _unit(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw between 0.1 and 0.9, for operators that accept nothing else."""
    return 0.1 + 0.8 * torch.rand(shape, generator=generator)


def _filled(values: list[float]) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
        for index, value in enumerate(values):
            flat[index :: 2 * len(values)] = value
        return flat.view(tensor.shape)

    return change


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor with gaps that repeat its elements."""
    flat = tensor.reshape(-1)
    pairs = torch.stack([flat, flat], 1).view(-1)
    return pairs.as_strided(tensor.shape, [2 * step for step in contiguous_strides(tuple(tensor.shape))], 0)


def _at_offset(tensor: torch.Tensor) -> torch.Tensor:
    """Lay out a tensor at an offset, after some of its own elements."""
    flat = tensor.reshape(-1)
    before = flat.flip(0)[:3]
    return torch.cat([before, flat]).as_strided(tensor.shape, contiguous_strides(tuple(tensor.shape)), len(before))


_SPECIAL: dict[str, Change] = {
    "nan_swallowed": _filled([float("nan")]),
    "inf_swallowed": _filled([float("inf"), float("-inf")]),
    "strides_ignored": _spread,
    "offset_ignored": _at_offset,
}
