"""Compare the operators registered in this process with the YAML file.

Runs where the user's registration was imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from opforge.edge.bindings import BindingEntry, BindingError
from opforge.sandbox.guest.loader import KernelLoadError, import_file


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
            f"{', '.join(lost)} is in the model but not in the program: export decomposed it, as it does with operators registered as "
            "CompositeImplicitAutograd, and its kernel would never run. Register it with CompositeExplicitAutograd, or for CPU with a fake"
        )


def _problem(entry: BindingEntry, definitions: str) -> str:
    registered = {name.name: name for name in _overloads(entry)}
    bare = entry.name.partition("::")[2]
    if entry.name not in registered:
        registered_names = ", ".join(sorted(registered)) or f"nothing of the name {bare.partition('.')[0]}"
        return (
            f"ops.yaml binds {entry.name}, and {definitions} does not register it (it registers {registered_names}); "
            "register the functional form and the out variant there"
        )
    ours, theirs = str(torch._C.parse_schema(entry.schema)), str(registered[entry.name].schema)  # noqa: SLF001
    if ours != theirs:
        return f"{entry.name} has one schema in ops.yaml and another where it is registered:\n  ops.yaml  {ours}\n  {definitions}  {theirs}\nmake them the same"
    return ""


class _Overload:
    def __init__(self, namespace: str, schema: torch.FunctionSchema) -> None:
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        self.name = f"{schema.name}{overload}" if "::" in schema.name else f"{namespace}::{schema.name}{overload}"
        self.schema = schema


def _overloads(entry: BindingEntry) -> list[_Overload]:
    """Return all overloads of an entry's operator."""
    packet = entry.name.partition(".")[0]
    schemas = torch._C._jit_get_schemas_for_operator(packet)  # noqa: SLF001  # torch has no public list
    return [_Overload(entry.namespace, schema) for schema in schemas]
