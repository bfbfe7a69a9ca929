"""Load the user's registration of operators and the model to export. Only the child does this."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opforge.edge.bindings import BindingEntry, BindingError
from opforge.edge.child import user_code
from opforge.edge.export import DynamicRanges
from opforge.errors import OpforgeError
from opforge.models.model import UnusableModelError, import_code
from opforge.models.target import ModelTarget
from opforge.sandbox.guest.loader import KernelLoadError, describe_exception, import_file


class ModelLoadError(OpforgeError):
    """No model can be loaded for export; the message says why."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ModelToExport:
    """A model, its inputs, and the module that defines them."""

    model: torch.nn.Module
    inputs: tuple[Any, ...]
    module: Any
    """The module that defines the model."""

    def input_names(self) -> list[str]:
        """Return the names of the inputs, from ``forward``."""
        return list(inspect.signature(self.model.forward).parameters)[: len(self.inputs)]

    def dynamic_shapes(self, ranges: DynamicRanges, inputs: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return ranges in torch.export's form; raise if one matches no dimension of an input."""
        if not ranges:
            return None
        names = self.input_names()
        shapes: dict[str, Any] = dict.fromkeys(names)
        for key, dims in ranges.items():
            name = names[int(key)] if key.isdigit() and int(key) < len(names) else key
            if name not in names:
                raise ModelLoadError(f"--dynamic names the input {key!r}; forward has {', '.join(names)}")
            tensor = inputs[names.index(name)]
            if not isinstance(tensor, torch.Tensor):
                raise ModelLoadError(f"--dynamic names {name}, which is {type(tensor).__name__}, not a tensor")
            shapes[name] = {dim: _size(name, tensor, dim, *ends) for dim, ends in dims.items()}
        return shapes


def _size(name: str, tensor: torch.Tensor, dim: int, low: int, high: int) -> Any:
    if dim >= tensor.dim():
        raise ModelLoadError(f"{name} has {tensor.dim()} dimensions; there is no dimension {dim} to be dynamic")
    if not max(low, 2) <= tensor.shape[dim] <= high:
        raise ModelLoadError(
            f"dimension {dim} of {name} is {tensor.shape[dim]} in the example inputs; "
            f"to be dynamic from {low} to {high} it must be in that range, and not 1, which export takes as a constant"
        )
    return torch.export.Dim.DYNAMIC(min=low, max=high)


def load_model(target: ModelTarget) -> ModelToExport:
    """Load the model and inputs of a target."""
    try:
        module = import_code(target)
    except UnusableModelError as error:
        raise ModelLoadError(str(error)) from None
    definition = getattr(module, target.function, None)
    if definition is None:
        raise ModelLoadError(f"{target.name} does not define {target.function}; it must define model() and inputs()")
    result = (
        definition
        if isinstance(definition, torch.nn.Module)
        else call_user_function(definition, f"{target.function}() of {target.name}")
    )
    if isinstance(result, tuple | list) and len(result) == 2:
        model, inputs = result
    elif callable(getattr(module, "inputs", None)):
        model, inputs = result, call_user_function(module.inputs, f"inputs() of {target.name}")
    else:
        raise ModelLoadError(
            f"{target.name} gives a model without inputs; define inputs() beside it, or return (model, inputs)"
        )
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(f"{target.name} gives {type(model).__name__}, not a torch.nn.Module")
    return ModelToExport(model.eval(), order_inputs(model, inputs), module)


def order_inputs(model: torch.nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return inputs in forward's order, from a tuple, a dict by name, or one tensor."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        names = list(inspect.signature(model.forward).parameters)
        if unknown := [name for name in inputs if name not in names]:
            raise ModelLoadError(f"inputs name {unknown[0]!r}; forward has {', '.join(names)}")
        return tuple(inputs[name] for name in names if name in inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    raise ModelLoadError(f"the inputs are {type(inputs).__name__}; allowed: a tuple, a dict by name, or one tensor")


def call_user_function(function: Any, label: str) -> Any:
    """Call a function of the user's code; raise ModelLoadError if it raises."""
    if not callable(function):
        raise ModelLoadError(f"{label.partition('()')[0]} is {type(function).__name__}, not a function")
    with user_code(lambda error: ModelLoadError(f"{label} raised {describe_exception(error)}")):
        return function()


def import_definitions(path: Path) -> None:
    """Run the file that registers operators. Models import it by its own name."""
    sys.path.insert(0, str(path.parent))
    try:
        sys.modules[path.stem] = import_file(path)
    except KernelLoadError as error:
        raise BindingError(str(error)) from None


def check_schemas(entries: Sequence[BindingEntry], definitions: str) -> None:
    """Raise if an entry's operator is not registered, or is registered with another schema."""
    problems = [problem for entry in entries if (problem := _problem(entry, definitions))]
    if problems:
        raise BindingError("\n".join(problems))


def refuse_decomposed(entries: Sequence[BindingEntry], names: Iterable[str]) -> None:
    """Raise if export decomposed an operator that has a kernel: the kernel would never run."""
    bound = {entry.name.partition(".")[0] for entry in entries}
    if lost := sorted(bound & set(names)):
        raise BindingError(
            f"{', '.join(lost)} is in the model but not in the program: export decomposed it, "
            "as it does with operators registered as CompositeImplicitAutograd, and its kernel would never run. "
            "Register it with CompositeExplicitAutograd, or for CPU with a fake"
        )


def _problem(entry: BindingEntry, definitions: str) -> str:
    registered = _overloads(entry)
    bare = entry.name.partition("::")[2]
    if entry.name not in registered:
        registered_names = ", ".join(sorted(registered)) or f"nothing of the name {bare.partition('.')[0]}"
        return (
            f"ops.yaml binds {entry.name}, and {definitions} does not register it (it registers {registered_names}); "
            "register the functional form and the out variant there"
        )
    ours, theirs = str(torch._C.parse_schema(entry.schema)), str(registered[entry.name])  # noqa: SLF001
    if ours != theirs:
        return (
            f"{entry.name} has one schema in ops.yaml and another where it is registered:\n"
            f"  ops.yaml  {ours}\n  {definitions}  {theirs}\nmake them the same"
        )
    return ""


def _overloads(entry: BindingEntry) -> dict[str, torch.FunctionSchema]:
    """Return all overloads of an entry's operator, by full name."""
    packet = entry.name.partition(".")[0]
    schemas = torch._C._jit_get_schemas_for_operator(packet)  # noqa: SLF001  # torch has no public list
    return {f"{packet}.{one.overload_name}" if one.overload_name else packet: one for one in schemas}
