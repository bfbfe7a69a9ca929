"""From a model to the bytes of a ``.pte``, with what commonly goes wrong on the way said in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opforge.edge.operators import RUNTIME_NAMESPACES
from opforge.edge.subject import Subject
from opforge.edge.target import Dynamic
from opforge.errors import OpforgeError


class ExportError(OpforgeError):
    """A model that does not become a program."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program."""

    data: bytes
    operators: tuple[str, ...]
    """All that it calls."""
    delegated: int
    """How many parts of it a backend runs."""


def lower(subject: Subject, inputs: tuple[Any, ...], ranges: Dynamic, *, xnnpack: bool = False) -> Lowered:
    """Export a model for given inputs, with dimensions that may vary, delegated to XNNPACK where that is wanted."""
    shapes = subject.dynamic_shapes(ranges, inputs)
    with torch.no_grad():
        try:
            exported = torch.export.export(subject.model, inputs, dynamic_shapes=shapes)
        except Exception as error:  # noqa: BLE001  # the border: export runs the user's code, and raises anything
            raise _export_error(error) from None
        used = sorted(set(_custom(exported.graph_module)))
        edge = _to_edge(exported, xnnpack=xnnpack)
        try:
            program = edge.to_executorch()
        except Exception as error:  # noqa: BLE001  # the border: export runs the user's code, and raises anything
            raise _out_variant_error(error) from None
    operators = tuple(_operators(program.buffer))
    _refuse_lost(used, operators)
    plan = program.executorch_program.execution_plan[0]
    return Lowered(program.buffer, operators, len(plan.delegates))


def _to_edge(exported: Any, *, xnnpack: bool) -> Any:
    from executorch.exir import to_edge, to_edge_transform_and_lower

    if not xnnpack:
        try:
            return to_edge(exported)
        except Exception as error:  # noqa: BLE001  # the border: export runs the user's code, and raises anything
            raise ExportError(f"the model cannot be brought into ExecuTorch's operators: {_first(error)}") from None
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    except ModuleNotFoundError as error:
        raise OpforgeError(
            f"delegating to XNNPACK needs {error.name}, which ExecuTorch's package asks for and is not installed here; "
            f"install it with `pip install {error.name}`, or leave --xnnpack out"
        ) from None
    try:
        return to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    except Exception as error:  # noqa: BLE001  # the border: export runs the user's code, and raises anything
        raise ExportError(f"the model cannot be delegated to XNNPACK: {_first(error)}") from None


def _operators(data: bytes) -> list[str]:
    from executorch.codegen.tools.selective_build import _get_program_from_buffer, _get_program_operators

    return sorted(set(_get_program_operators(_get_program_from_buffer(data))))


def _custom(graph_module: Any) -> Iterator[str]:
    """Yield the names of operators in a graph whose kernels do not come with ExecuTorch."""
    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in RUNTIME_NAMESPACES:  # noqa: SLF001
                yield node.target.name().partition(".")[0]


def _refuse_lost(used: list[str], operators: tuple[str, ...]) -> None:
    """Refuse a program from which an operator has vanished: export takes apart what is registered as composite."""
    kept = {name.partition(".")[0] for name in operators}
    if lost := [name for name in used if name not in kept]:
        raise ExportError(
            f"{', '.join(lost)} is in the model and not in the program: export took it apart, as it does with what is registered as CompositeImplicitAutograd. "
            "Register it with CompositeExplicitAutograd, or for CPU with a fake"
        )


def _export_error(error: Exception) -> ExportError:
    text = str(error)
    found = re.search(r"(\w+)[.:]+(\w+)(?:\.\w+)?", text) if "fake impl" in text or "FakeTensor" in text else None
    if (
        "no fake impl" in text
        or "UnsupportedOperatorException" in type(error).__name__
        or "DynamicOutputShape" in type(error).__name__
    ):
        what = f" ({found[0]})" if found else ""
        return ExportError(
            f"an operator of the model{what} cannot be run on fake tensors, which have no contents: {_first(error)}. "
            "Give it a fake: define(…, fake=…), or torch.library.register_fake"
        )
    return ExportError(f"the model cannot be exported: {_first(error)}")


def _out_variant_error(error: Exception) -> ExportError:
    text = str(error)
    if "out variant" in text.lower():
        return ExportError(
            f"an operator has no out variant that fits its functional form: {_first(error)}. Register NAME.out with the same argument names, and one more "
            "argument for each result; opforge.edge.define.define makes both from one definition"
        )
    return ExportError(f"the program cannot be made: {_first(error)}")


def _first(error: Exception) -> str:
    """Return what an error says, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])[:600]}"
