"""Export a folder's model for each case, and compare the results of the runs. Only the child does this.

Each case is exported as a program of its own. Dynamic programs serve many sizes. No kernel runs here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from opforge.cases.tensors import same_bytes
from opforge.edge.bindings import BindingEntry
from opforge.edge.check import CheckedProgram, FinishedRun, FolderQuestion, PlannedRun, ResultComparison
from opforge.edge.child import user_code
from opforge.edge.export import DynamicRanges
from opforge.edge.model_loading import (
    ModelLoadError,
    ModelToExport,
    call_user_function,
    check_schemas,
    import_definitions,
    load_model,
    order_inputs,
    refuse_decomposed,
)
from opforge.edge.operator_calls import CallRecorder, OperatorCalls, RecordedCall, distinct_calls
from opforge.edge.program_inputs import flatten, inputs_text, load_values, save_tensors
from opforge.errors import OpforgeError
from opforge.judge.compare.numerics import reduction_length
from opforge.judge.reference.aten import CallOutcome, Float64Answers, widen_dtypes
from opforge.models.tensor_comparison import compare
from opforge.runtime.trees import instances, map_instances

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Inputs of one exported program: the example for export, and all inputs it is run on."""

    kind: str
    """``static``, ``dynamic``, or ``calls``: the operators' calls, each by itself."""
    ranges: DynamicRanges
    example: Inputs
    inputs: tuple[Inputs, ...]
    model: torch.nn.Module

    def label(self, inputs: Inputs) -> str:
        if isinstance(self.model, OperatorCalls):
            return f"{len(self.model.calls)} calls, each by itself"
        return inputs_text(inputs)


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


def load_groups(question: FolderQuestion) -> tuple[ModelToExport, list[CaseGroup]]:
    """Import a folder's operators, compare them with its YAML file, and load its model and cases.

    The random numbers that its code draws are the same each time.
    """
    torch.manual_seed(0)
    if question.definitions is not None:
        import_definitions(question.definitions)
        check_schemas(question.entries, question.definitions.name)
    loaded = load_model(question.target)
    return loaded, case_groups(loaded, [entry.name.partition(".")[0] for entry in question.entries])


def case_groups(loaded_model: ModelToExport, operators: Sequence[str] = ()) -> list[CaseGroup]:
    """Return the programs to export: one for each case, the dynamic ones, and one of calls.

    There is a dynamic program for each rank and dtype that fits the ranges. If the model calls more
    than one operator, another program makes each call of the given operators by itself.
    """
    cases, ranges, model = _listed_cases(loaded_model), _dynamic_ranges(loaded_model), loaded_model.model
    all_groups = [CaseGroup("static", {}, case, (case,), model) for case in cases]
    if ranges:
        all_groups += _dynamic(model, loaded_model.input_names(), cases, ranges)
    if calls := distinct_calls([call for case in cases for call in _calls_among_others(model, case, operators)]):
        alone = OperatorCalls(calls)
        all_groups.append(CaseGroup("calls", {}, alone.inputs, (alone.inputs,), alone))
    return all_groups


def _calls_among_others(model: torch.nn.Module, case: Inputs, operators: Sequence[str]) -> list[RecordedCall]:
    """Return the calls of operators in a run of the model; none if it makes one call only."""
    inputs = copy.deepcopy(case)
    with user_code(_eager_error), torch.no_grad(), CallRecorder(operators) as recorder:
        model(*inputs)
    return recorder.calls if recorder.count > 1 else []


def _dynamic(
    model: torch.nn.Module, names: list[str], cases: list[Inputs], ranges: DynamicRanges
) -> Iterator[CaseGroup]:
    by_kind: dict[Any, list[Inputs]] = {}
    for case in cases:
        if _fits(names, case, ranges):
            by_kind.setdefault(_kind(case), []).append(case)
    for similar in by_kind.values():
        example = next((case for case in similar if _fits(names, case, ranges, at_least=2)), None)
        if example is not None:
            ends = (_resized_case(names, example, ranges, end) for end in (0, 1))
            yield CaseGroup("dynamic", ranges, example, (*similar, *ends), model)


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
    loaded_model: ModelToExport, group: CaseGroup, entries: Sequence[BindingEntry], path: Path, number: int
) -> CheckedProgram:
    """Export the program of a group to a file, and save the inputs and expected results of its runs."""
    from opforge.edge.lowering import lower  # takes seconds to import

    example = group.label(group.example)
    try:
        lowered = lower(replace(loaded_model, model=group.model), group.example, group.ranges)
        refuse_decomposed(entries, lowered.decomposed)
    except OpforgeError as error:
        return CheckedProgram(group.kind, example, error=str(error))
    path.write_bytes(lowered.data)
    runs = tuple(
        _planned_run(group, case, path.with_name(f"{path.stem}-{index}"), (number, index))
        for index, case in enumerate(group.inputs)
    )
    return CheckedProgram(group.kind, example, path, lowered.operators, runs)


def _planned_run(group: CaseGroup, case: Inputs, folder: Path, place: tuple[int, int]) -> PlannedRun:
    """Save the inputs of a run and its expected results."""
    folder.mkdir()
    with user_code(_eager_error):
        expected = _run_eagerly(group.model, case)
    return PlannedRun(
        group.label(case),
        folder,
        save_tensors(folder / "inputs.safetensors", flatten(case)),
        save_tensors(folder / "expected.safetensors", expected),
        place,
    )


def _eager_error(error: Exception) -> ModelLoadError:
    return ModelLoadError(f"the model raised in eager PyTorch: {type(error).__name__}: {error}")


def _run_eagerly(model: torch.nn.Module, inputs: Inputs) -> list[Any]:
    """Return a model's results in eager PyTorch; the inputs are not changed."""
    with torch.no_grad():
        return flatten(model(*copy.deepcopy(inputs)))


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A model's run in eager PyTorch, as the reference of a comparison."""

    model: torch.nn.Module
    inputs: Inputs
    reproducible: bool
    """Whether the model gives the expected results again."""

    def run(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> CallOutcome:
        """Run the model, from changed weights and inputs if ``change`` is given."""
        model, inputs = self.model, self.inputs
        if change is not None:
            model = copy.deepcopy(model)
            with torch.no_grad():
                for changed, weight in zip(_weights(model), _weights(self.model), strict=True):
                    changed.data = change(weight)
                inputs = widen_dtypes(map_instances(inputs, torch.Tensor, change))
        try:
            return CallOutcome([], _run_eagerly(model, inputs))
        except Exception as error:  # noqa: BLE001  # not every model runs in float64
            return CallOutcome([], raised=error)

    def with_kept_inputs(self) -> EagerCall:
        return self

    def rounds_internally(self) -> bool:
        """Whether the float64 results are none of this model's."""
        return not self.reproducible

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the inputs and weights."""
        return [*instances(self.inputs, torch.Tensor), *_weights(self.model)]


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass
class RunComparer:
    """Compares the results of runs with eager PyTorch, by the judge's bounds.

    The model is loaded if a result differs from the expected one.
    """

    folder: FolderQuestion

    @cached_property
    def _groups(self) -> list[CaseGroup]:
        return load_groups(self.folder)[1]

    def compare(self, run: FinishedRun) -> ResultComparison:
        """Compare the results of a run; constants of the program are not results."""
        folder = run.planned.folder
        expected = load_values(folder / "expected.safetensors", run.planned.expected)
        results = load_values(folder / "results.safetensors", [None] * len(expected))
        pairs = [
            (number, ours, eager)
            for number, (ours, eager) in enumerate(zip(results, expected, strict=True))
            if isinstance(eager, torch.Tensor) and not (isinstance(ours, torch.Tensor) and _same(ours, eager))
        ]
        if not pairs:
            return ResultComparison("", 0.0)
        call = self._call(run.planned, expected)
        reasons, difference = [], 0.0
        for number, ours, eager in pairs:
            if not isinstance(ours, torch.Tensor):
                reasons.append(f"result {number} is not a tensor")
                continue
            index = sum(isinstance(value, torch.Tensor) for value in expected[:number])
            alone = call.model.call_of(index) if isinstance(call.model, OperatorCalls) else None
            label = f"result {number}" if alone is None else f"{alone}, result {number}"
            compared = compare(
                label, ours, eager, Float64Answers(call), index,
                reduction_length=reduction_length(call.tensors if alone is None else alone.tensors, eager),
                rounds_between=alone is None and run.calls > 1, reference_name="eager PyTorch",
            )  # fmt: skip
            reasons += [] if compared.passed else [compared.reason]
            difference = max(difference, _difference(ours, eager))
        return ResultComparison("; ".join(reasons), difference)

    def _call(self, planned: PlannedRun, expected: list[Any]) -> EagerCall:
        group, index = self._groups[planned.place[0]], planned.place[1]
        _leaves, structure = torch.utils._pytree.tree_flatten(group.inputs[index])  # noqa: SLF001
        leaves = load_values(planned.folder / "inputs.safetensors", planned.inputs)
        inputs = torch.utils._pytree.tree_unflatten(leaves, structure)  # noqa: SLF001
        again = _run_eagerly(group.model, inputs)
        same = all(_same(*pair) for pair in zip(again, expected, strict=True) if isinstance(pair[1], torch.Tensor))
        return EagerCall(group.model, inputs, same)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and same_bytes(left, right)


def _difference(ours: torch.Tensor, eager: torch.Tensor) -> float:
    if ours.shape != eager.shape or not eager.numel():
        return 0.0
    differences = (ours.double() - eager.double()).abs()
    equal = (ours == eager) | (ours.isnan() & eager.isnan())
    return float(torch.where(equal, 0.0, differences).max())
