"""Lower a model to the bytes of a ``.pte``, and explain common errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from opforge.edge.bindings import RUNTIME_NAMESPACES
from opforge.edge.child import user_code
from opforge.edge.export import DynamicRanges, ExportError
from opforge.edge.model_loading import ModelToExport
from opforge.edge.out_variants import out_variant
from opforge.errors import OpforgeError

_CONSTANT_DIM_PATTERN = re.compile(
    r"L\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\] "
    r"as dynamic but your code specialized it to be a constant \((?P<size>\d+)\)"
)


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """An exported program."""

    data: bytes
    operators: tuple[str, ...]
    """All operators that it calls."""
    delegated: int
    """Number of parts that a backend runs."""
    decomposed: tuple[str, ...] = ()
    """Operators of the model that are not in the program.

    Export decomposes operators that are registered as composite.
    """


def lower(
    loaded_model: ModelToExport, inputs: tuple[Any, ...], ranges: DynamicRanges, *, xnnpack: bool = False
) -> LoweredProgram:
    """Export a model for given inputs and dynamic dimensions; with ``xnnpack``, delegate to it."""
    shapes = loaded_model.dynamic_shapes(ranges, inputs)
    with torch.no_grad():
        with user_code(_export_error):
            exported = torch.export.export(loaded_model.model, inputs, dynamic_shapes=shapes)
        overloads = {op.name(): op for op in _custom(exported.graph_module)}
        for name, op in overloads.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):  # noqa: SLF001
                _check_out_variant(op)
        edge = _to_edge(exported, xnnpack=xnnpack)
        with _failing("the program cannot be made"):
            program = edge.to_executorch()
    operators = tuple(_operators(program.buffer))
    remaining = {name.partition(".")[0] for name in operators}
    decomposed = sorted({name.partition(".")[0] for name in overloads} - remaining)
    plan = program.executorch_program.execution_plan[0]
    return LoweredProgram(program.buffer, operators, len(plan.delegates), tuple(decomposed))


def _to_edge(exported: Any, *, xnnpack: bool) -> Any:
    from executorch.exir import to_edge, to_edge_transform_and_lower

    if not xnnpack:
        with _failing("the model cannot be converted to ExecuTorch's operators"):
            return to_edge(exported)
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    except ModuleNotFoundError as error:
        raise OpforgeError(
            f"delegating to XNNPACK needs {error.name}, which ExecuTorch requires and is not installed here; "
            f"install it with `pip install {error.name}`, or leave --xnnpack out"
        ) from None
    with _failing("the model cannot be delegated to XNNPACK"):
        return to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])


def _operators(data: bytes) -> list[str]:
    from executorch.codegen.tools.selective_build import _get_program_from_buffer, _get_program_operators

    return sorted(set(_get_program_operators(_get_program_from_buffer(data))))


def _custom(graph_module: Any) -> Iterator[Any]:
    """Yield the operators in a graph whose kernels are not part of ExecuTorch."""
    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            target = node.target
            if isinstance(target, OpOverload) and target.namespace not in RUNTIME_NAMESPACES:
                yield target


def _check_out_variant(op: Any) -> None:
    """Raise if an operator has no out variant with the same argument names.

    The runtime calls the out variant.
    """
    name, arguments = op.name().partition(".")[0], [one.name for one in op._schema.arguments]  # noqa: SLF001
    out_variants = [
        one for one in _registered_schemas(name) if any(_is_written(argument) for argument in one.arguments)
    ]
    hint = _out_variant_hint(op)
    if not out_variants:
        raise ExportError(f"{name} has no out variant, which the runtime calls; register {hint}")
    inputs = [[one.name for one in schema.arguments if not _is_written(one)] for schema in out_variants]
    if arguments not in inputs:
        raise ExportError(
            f"{name} takes ({', '.join(arguments)}), and its out variant ({', '.join(inputs[0])}): "
            f"both must have the same argument names; register {hint}"
        )


def _registered_schemas(name: str) -> list[Any]:
    return list(torch._C._jit_get_schemas_for_operator(name))  # noqa: SLF001  # torch has no public list


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _out_variant_hint(op: Any) -> str:
    """Describe the out variant that an operator should have, for an error message."""
    try:
        form = out_variant(str(op._schema))  # noqa: SLF001
    except OpforgeError:
        return "NAME.out with the same arguments, and one more for each result"
    return f"{form.namespace}::{form.out_schema}, or both at once with opforge.edge.define.define"


def _failing(step: str) -> AbstractContextManager[None]:
    """Explain whatever a step of export raises."""
    return user_code(lambda error: ExportError(f"{step}: {_error_summary(error)}"))


def _export_error(error: Exception) -> ExportError:
    """Explain an error of torch.export."""
    text = str(error)
    if (fixed := _CONSTANT_DIM_PATTERN.search(text)) is not None:
        return ExportError(
            f"dimension {fixed['dim']} of {fixed['input']} cannot vary: the model's code fixes it to {fixed['size']}; "
            "do not make it dynamic, or change the model"
        )
    if type(error).__name__ == "UnsupportedOperatorException":
        match = re.match(r"(\w+)\.(\w+)\.\w+", text)
        name = f"{match[1]}::{match[2]}" if match else "an operator of the model"
        return ExportError(
            f"{name} has no fake, from which export gets shapes and dtypes; "
            "give it one: define(…, fake=…), or torch.library.register_fake"
        )
    return ExportError(f"the model cannot be exported: {_error_summary(error)}")


def _error_summary(error: Exception) -> str:
    """Return an error's type and the first lines of its message."""
    message = str(error).partition("The error above occurred when calling")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])[:600]}"
