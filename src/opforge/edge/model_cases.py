"""Export a folder's model for each case, and compare the results of the runs. Only the child does this.

Each case is exported as a program of its own. Dynamic programs serve many sizes. No kernel runs here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opforge.edge.bindings import BindingEntry
from opforge.edge.check import CheckedProgram, PlannedRun, ResultComparison
from opforge.edge.child import user_code
from opforge.edge.export import DynamicRanges
from opforge.edge.model_loading import (
    ModelLoadError,
    ModelToExport,
    call_user_function,
    order_inputs,
    refuse_decomposed,
)
from opforge.edge.program_inputs import flatten, inputs_text, load_values, save_tensors
from opforge.errors import OpforgeError

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Inputs of one exported program: the example for export, and all inputs it is run on."""

    kind: str
    """``static`` or ``dynamic``."""
    ranges: DynamicRanges
    example: Inputs
    inputs: tuple[Inputs, ...]


def _listed_cases(loaded_model: ModelToExport) -> list[Inputs]:
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


def _dynamic_ranges(loaded_model: ModelToExport) -> DynamicRanges:
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


def case_groups(loaded_model: ModelToExport) -> list[CaseGroup]:
    """Return the programs to export: one for each case, and the dynamic ones.

    There is a dynamic program for each rank and dtype that fits the ranges.
    """
    cases, ranges = _listed_cases(loaded_model), _dynamic_ranges(loaded_model)
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


def export_group(
    loaded_model: ModelToExport, group: CaseGroup, entries: Sequence[BindingEntry], path: Path
) -> CheckedProgram:
    """Export the program of a group to a file, and save the inputs and expected results of its runs."""
    from opforge.edge.lowering import lower  # takes seconds to import

    example = inputs_text(group.example)
    try:
        lowered = lower(loaded_model, group.example, group.ranges)
        refuse_decomposed(entries, lowered.decomposed)
    except OpforgeError as error:
        return CheckedProgram(group.kind, example, error=str(error))
    path.write_bytes(lowered.data)
    folders = (path.with_name(f"{path.stem}-{index}") for index in range(len(group.inputs)))
    runs = tuple(_planned_run(loaded_model, case, folder) for case, folder in zip(group.inputs, folders, strict=True))
    return CheckedProgram(group.kind, example, path, lowered.operators, runs)


def _planned_run(loaded_model: ModelToExport, case: Inputs, folder: Path) -> PlannedRun:
    """Save the inputs of a run and its expected results."""
    folder.mkdir()
    expected, exact = _reference_results(loaded_model.model, case)
    return PlannedRun(
        inputs_text(case),
        folder,
        save_tensors(folder / "inputs.safetensors", flatten(case)),
        save_tensors(folder / "expected.safetensors", expected),
        save_tensors(folder / "exact.safetensors", exact) if exact is not None else None,
    )


def _reference_results(model: torch.nn.Module, case: Inputs) -> tuple[list[Any], list[Any] | None]:
    """Return a model's results in eager PyTorch, and in float64 if it can run so.

    The inputs are not changed.
    """
    with torch.no_grad():
        with user_code(_eager_error):
            results = flatten(model(*copy.deepcopy(case)))
        try:
            wide = flatten(copy.deepcopy(model).double()(*torch.utils._pytree.tree_map(_widened, case)))  # noqa: SLF001
        except Exception:  # noqa: BLE001  # not every model can; eager alone is the reference then
            return results, None
    shapes, wide_shapes = ([getattr(value, "shape", None) for value in values] for values in (results, wide))
    return results, wide if shapes == wide_shapes else None


def _eager_error(error: Exception) -> ModelLoadError:
    return ModelLoadError(f"the model raised in eager PyTorch: {type(error).__name__}: {error}")


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else copy.deepcopy(value)


def compare_run(run: PlannedRun) -> ResultComparison:
    """Compare the results of a run with eager PyTorch.

    The tolerance comes from eager PyTorch's own error against float64.
    """
    from opforge.models.tensor_comparison import compare

    expected = load_values(run.folder / "expected.safetensors", run.expected)
    exact: list[Any] = [None] * len(expected)
    if run.exact is not None:
        exact = load_values(run.folder / "exact.safetensors", run.exact)
    results = load_values(run.folder / "results.safetensors", [None] * len(expected))
    reasons, difference = [], 0.0
    for number, (ours, eager, wide) in enumerate(zip(results, expected, exact, strict=True)):
        if not isinstance(eager, torch.Tensor):
            continue  # a constant of the program
        if not isinstance(ours, torch.Tensor):
            reasons.append(f"result {number} is not a tensor")
            continue
        compared = compare(f"result {number}", ours, eager, wide if isinstance(wide, torch.Tensor) else None)
        reasons += [] if compared.passed else [compared.reason]
        difference = max(difference, _difference(ours, eager))
    return ResultComparison("; ".join(reasons), difference)


def _difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    if ours.shape != eager.shape or not eager.numel():
        return 0.0
    differences = (ours.double() - eager.double()).abs()
    equal = (ours == eager) | (ours.isnan() & eager.isnan())
    return float(torch.where(equal, 0.0, differences).max())
