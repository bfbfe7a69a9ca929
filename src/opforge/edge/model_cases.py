"""The inputs that a folder's model is checked on. Runs where torch is.

Each case is exported as a program of its own. Dynamic programs serve many sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opforge.edge.model import LoadedModel, ModelLoadError, call_user_function, order_inputs
from opforge.edge.program_inputs import flatten
from opforge.edge.target import DynamicRanges

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Inputs of one exported program: the example for export, and all inputs it is run on."""

    kind: str
    """``static`` or ``dynamic``."""
    ranges: DynamicRanges
    example: Inputs
    inputs: tuple[Inputs, ...]


def listed_cases(loaded_model: LoadedModel) -> list[Inputs]:
    """Return the inputs that ``cases()`` in the model's file lists, or else its only inputs."""
    listed = getattr(loaded_model.module, "cases", None)
    if listed is None:
        return [loaded_model.inputs]
    result = call_user_function(listed, "cases() of the model's file")
    if not isinstance(result, list | tuple) or not result:
        raise ModelLoadError(
            "cases() of the model's file did not return a list of inputs; return a list of tuples like that of inputs()"
        )
    return [order_inputs(loaded_model.model, case) for case in result]


def dynamic_ranges(loaded_model: LoadedModel) -> DynamicRanges:
    """Return the ranges that ``dynamic()`` in the model's file gives.

    They hold the minimum and maximum size for each input and dimension.
    """
    listed = getattr(loaded_model.module, "dynamic", None)
    if listed is None:
        return {}
    result = call_user_function(listed, "dynamic() of the model's file")
    try:
        ranges = {
            str(name): {int(dim): (int(low), int(high)) for dim, (low, high) in dims.items()}
            for name, dims in result.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise ModelLoadError(
            f"dynamic() of the model's file returned {result!r}; return {{'x': {{0: (1, 64)}}}}"
        ) from None
    if wrong := [ends for dims in ranges.values() for ends in dims.values() if not 1 <= ends[0] < ends[1]]:
        raise ModelLoadError(f"dynamic() gives sizes {wrong[0]}; 1 or more, and the second larger than the first")
    if unknown := [name for name in ranges if name not in loaded_model.input_names()]:
        raise ModelLoadError(
            f"dynamic() names the input {unknown[0]!r}; forward has {', '.join(loaded_model.input_names())}"
        )
    return ranges


def case_groups(loaded_model: LoadedModel) -> list[CaseGroup]:
    """Return the programs to export: one for each case, and the dynamic ones.

    There is a dynamic program for each rank and dtype that fits the ranges.
    """
    cases, ranges = listed_cases(loaded_model), dynamic_ranges(loaded_model)
    all_groups = [CaseGroup("static", {}, case, (case,)) for case in cases]
    if ranges:
        all_groups += _dynamic(loaded_model.input_names(), cases, ranges)
    return all_groups


def _dynamic(names: list[str], cases: list[Inputs], ranges: DynamicRanges) -> Iterator[CaseGroup]:
    by_kind: dict[Any, list[Inputs]] = {}
    for case in cases:
        if _fits(names, case, ranges):
            by_kind.setdefault(_kind(case), []).append(case)
    for similar in by_kind.values():
        example = next((case for case in similar if _fits(names, case, ranges, at_least=2)), None)
        if example is not None:
            ends = (_resized_case(names, example, ranges, end) for end in (0, 1))
            yield CaseGroup("dynamic", ranges, example, (*similar, *ends))


def _kind(case: Inputs) -> Any:
    return tuple((value.dtype, value.dim()) if isinstance(value, torch.Tensor) else value for value in flatten(case))


def _fits(names: list[str], case: Inputs, ranges: DynamicRanges, at_least: int = 1) -> bool:
    """Whether all dynamic dimensions exist and are within their ranges."""
    for name, dims in ranges.items():
        value = case[names.index(name)] if names.index(name) < len(case) else None
        if not isinstance(value, torch.Tensor):
            return False
        for dim, (low, high) in dims.items():
            if dim >= value.dim() or not max(low, at_least) <= value.shape[dim] <= high:
                return False
    return True


def _resized_case(names: list[str], case: Inputs, ranges: DynamicRanges, end: int) -> Inputs:
    """Return a case with all dynamic dimensions at one end of their ranges; contents repeat."""
    values = list(case)
    for name, dims in ranges.items():
        for dim, ends in dims.items():
            tensor = values[names.index(name)]
            values[names.index(name)] = tensor.index_select(dim, torch.arange(ends[end]) % tensor.shape[dim])
    return tuple(values)


def reference_results(model: torch.nn.Module, case: Inputs) -> tuple[list[Any], list[Any] | None]:
    """Return a model's results in eager PyTorch, and in float64 if it can run so.

    The inputs are not changed.
    """
    with torch.no_grad():
        try:
            results = flatten(model(*copy.deepcopy(case)))
        except Exception as error:  # noqa: BLE001  # boundary: it is the user's code
            raise ModelLoadError(f"the model raised in eager PyTorch: {type(error).__name__}: {error}") from None
        try:
            wide = flatten(copy.deepcopy(model).double()(*torch.utils._pytree.tree_map(_widened, case)))  # noqa: SLF001
        except Exception:  # noqa: BLE001  # not every model can; eager alone is the reference then
            wide = None
    fits = wide is not None and [getattr(v, "shape", None) for v in wide] == [
        getattr(v, "shape", None) for v in results
    ]
    return results, wide if fits else None


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else copy.deepcopy(value)
