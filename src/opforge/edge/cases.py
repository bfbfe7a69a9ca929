"""The inputs that a folder's model is checked on. Runs where torch is.

Each case is exported as a program of its own. Dynamic programs serve many sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opforge.edge.inputs import leaves
from opforge.edge.subject import Subject, SubjectError, call, ordered
from opforge.edge.target import Dynamic

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs of one exported program: the example for export, and all inputs it is run on."""

    kind: str
    """``static`` or ``dynamic``."""
    ranges: Dynamic
    example: Inputs
    runs: tuple[Inputs, ...]


def cases_of(subject: Subject) -> list[Inputs]:
    """Return the inputs that ``cases()`` in the model's file lists, or else its only inputs."""
    listed = getattr(subject.file, "cases", None)
    if listed is None:
        return [subject.inputs]
    result = call(listed, "cases() of the model's file")
    if not isinstance(result, list | tuple) or not result:
        raise SubjectError(
            "cases() of the model's file returned no list of inputs; return one, each a tuple as inputs() gives"
        )
    return [ordered(subject.model, case) for case in result]


def ranges_of(subject: Subject) -> Dynamic:
    """Return the ranges that ``dynamic()`` in the model's file gives.

    They hold the minimum and maximum size for each input and dimension.
    """
    listed = getattr(subject.file, "dynamic", None)
    if listed is None:
        return {}
    result = call(listed, "dynamic() of the model's file")
    try:
        ranges = {
            str(name): {int(dim): (int(low), int(high)) for dim, (low, high) in dims.items()}
            for name, dims in result.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise SubjectError(
            f"dynamic() of the model's file returned {result!r}; return {{'x': {{0: (1, 64)}}}}"
        ) from None
    if wrong := [ends for dims in ranges.values() for ends in dims.values() if not 1 <= ends[0] < ends[1]]:
        raise SubjectError(f"dynamic() gives sizes {wrong[0]}; 1 or more, and the second larger than the first")
    if unknown := [name for name in ranges if name not in subject.parameters()]:
        raise SubjectError(f"dynamic() names the input {unknown[0]!r}; forward has {', '.join(subject.parameters())}")
    return ranges


def groups(subject: Subject) -> list[Group]:
    """Return the programs to export: one for each case, and the dynamic ones.

    There is a dynamic program for each rank and dtype that fits the ranges.
    """
    cases, ranges = cases_of(subject), ranges_of(subject)
    all_groups = [Group("static", {}, case, (case,)) for case in cases]
    if ranges:
        all_groups += _dynamic(subject.parameters(), cases, ranges)
    return all_groups


def _dynamic(names: list[str], cases: list[Inputs], ranges: Dynamic) -> Iterator[Group]:
    by_kind: dict[Any, list[Inputs]] = {}
    for case in cases:
        if _fits(names, case, ranges):
            by_kind.setdefault(_kind(case), []).append(case)
    for similar in by_kind.values():
        example = next((case for case in similar if _fits(names, case, ranges, at_least=2)), None)
        if example is not None:
            ends = (_resized_case(names, example, ranges, end) for end in (0, 1))
            yield Group("dynamic", ranges, example, (*similar, *ends))


def _kind(case: Inputs) -> Any:
    return tuple((value.dtype, value.dim()) if isinstance(value, torch.Tensor) else value for value in leaves(case))


def _fits(names: list[str], case: Inputs, ranges: Dynamic, at_least: int = 1) -> bool:
    """Whether all dynamic dimensions exist and are within their ranges."""
    for name, dims in ranges.items():
        value = case[names.index(name)] if names.index(name) < len(case) else None
        if not isinstance(value, torch.Tensor):
            return False
        for dim, (low, high) in dims.items():
            if dim >= value.dim() or not max(low, at_least) <= value.shape[dim] <= high:
                return False
    return True


def _resized_case(names: list[str], case: Inputs, ranges: Dynamic, end: int) -> Inputs:
    """Return a case with all dynamic dimensions at one end of their ranges; contents repeat."""
    values = list(case)
    for name, dims in ranges.items():
        for dim, ends in dims.items():
            tensor = values[names.index(name)]
            values[names.index(name)] = tensor.index_select(dim, torch.arange(ends[end]) % tensor.shape[dim])
    return tuple(values)


def answers(model: torch.nn.Module, case: Inputs) -> tuple[list[Any], list[Any] | None]:
    """Return a model's results in eager PyTorch, and in float64 if it can run so.

    The inputs are not changed.
    """
    with torch.no_grad():
        try:
            results = leaves(model(*copy.deepcopy(case)))
        except Exception as error:  # noqa: BLE001  # boundary: it is the user's code
            raise SubjectError(f"the model raised in eager PyTorch: {type(error).__name__}: {error}") from None
        try:
            wide = leaves(copy.deepcopy(model).double()(*torch.utils._pytree.tree_map(_widened, case)))  # noqa: SLF001
        except Exception:  # noqa: BLE001  # not every model can; eager alone is the reference then
            wide = None
    fits = wide is not None and [getattr(v, "shape", None) for v in wide] == [
        getattr(v, "shape", None) for v in results
    ]
    return results, wide if fits else None


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else copy.deepcopy(value)
