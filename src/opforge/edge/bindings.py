"""Read the YAML file that binds operators to C++ kernels, and select operators of it.

Entries that ExecuTorch cannot use are rejected. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from opforge.edge.out_variants import parse_schema
from opforge.edge.program import program_operators
from opforge.errors import OpforgeError, UnknownNameError

RUNTIME_NAMESPACES = ("aten", "prim", "prims", "executorch_prim", "dim_order_ops", "quantized_decomposed")
"""Namespaces whose kernels come with ExecuTorch."""
_NAME = re.compile(r"(?P<namespace>\w+)::(?P<op>\w+)(?:\.(?P<overload>\w+))?")
_KERNEL = re.compile(r"\w+(?:::\w+)+")
_FIELDS = ("func", "kernels", "variants")


class BindingError(OpforgeError):
    """An entry of the YAML file cannot work."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class BindingEntry:
    """One operator with its kernel."""

    name: str
    """With namespace and overload: ``my_ops::mul3.out``."""
    schema: str
    """As in the file, with the namespace."""
    kernel_name: str
    """As in the file: ``my_ops::mul3_out``."""

    @property
    def cpp_function(self) -> str:
        """Return the C++ function called: code generation adds ``native`` before the last part."""
        namespace, _, name = self.kernel_name.rpartition("::")
        return f"{namespace}::native::{name}"

    @property
    def namespace(self) -> str:
        return self.name.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Selection:
    """The operators to register."""

    names: tuple[str, ...]
    origin: str
    """How they were selected."""


def read_bindings(path: Path) -> tuple[BindingEntry, ...]:
    """Return the entries of a YAML file, or raise with the wrong entry, the reason and a fix."""
    try:
        rows = yaml.safe_load(path.read_text())
    except OSError as error:
        raise OpforgeError(
            f"{str(path)!r} cannot be read: {error.strerror}; it binds operators to kernels; "
            "create one with `opforge edge init`"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise BindingError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(rows, list) or not rows:
        raise BindingError(f"{path} holds no operators; it must be a list of entries with func and kernels")
    entries = tuple(_entry(row, f"{path}, entry {number}") for number, row in enumerate(rows, 1))
    _refuse_duplicates(path, entries)
    return entries


def _entry(row: Any, where: str) -> BindingEntry:
    if not isinstance(row, dict) or not isinstance(row.get("func"), str):
        raise BindingError(f"{where} has no func, which is the operator's schema, such as {_EXAMPLE!r}")
    schema = " ".join(row["func"].split())
    name = _name(schema, where)
    where = f"{where} ({name})"
    if unknown := [str(key) for key in row if key not in _FIELDS]:
        raise BindingError(f"{where} has the field {unknown[0]!r}; allowed: func, kernels")
    return BindingEntry(name, schema, _kernel_name(row.get("kernels"), where))


_EXAMPLE = "my_ops::mul3.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


def _name(schema: str, where: str) -> str:
    head = schema.partition("(")[0]
    match = _NAME.fullmatch(head)
    if match is None:
        raise BindingError(f"{where}: {head!r} is not an operator with its namespace; write it as {_EXAMPLE!r}")
    if match["namespace"] in RUNTIME_NAMESPACES:
        raise BindingError(
            f"{where}: {head} is in {match['namespace']}::, whose operators ExecuTorch registers itself; "
            "a second registration ends the process. Choose a namespace of your own"
        )
    try:
        parsed = parse_schema(schema.partition("::")[2])
    except OpforgeError as error:
        raise BindingError(f"{where}: {error}") from None
    if not parsed.arguments.out:
        raise BindingError(
            f"{where}: {head} has no argument that it writes its result to; "
            f"the runtime calls the out variant: bind {_EXAMPLE!r}"
        )
    return head


def _kernel_name(kernels: Any, where: str) -> str:
    if not isinstance(kernels, list) or len(kernels) != 1 or not isinstance(kernels[0], dict):
        raise BindingError(f"{where} must have one entry under kernels, with arg_meta: null and kernel_name")
    kernel = kernels[0]
    if kernel.get("arg_meta") is not None:
        raise BindingError(
            f"{where}: arg_meta is {kernel['arg_meta']!r}; only null works, which is one kernel for all dtypes: "
            "switch over the dtype in it (ET_SWITCH_…)"
        )
    name = kernel.get("kernel_name")
    if not isinstance(name, str) or _KERNEL.fullmatch(name) is None:
        raise BindingError(
            f"{where}: kernel_name is {name!r}; it is namespace::function, such as my_ops::mul3_out, "
            "and means the C++ function my_ops::native::mul3_out"
        )
    if re.search(r"(^|::)native::\w+$", name):
        plain = re.sub(r"native::(?=\w+$)", "", name)
        meant = name.replace("native::", "native::native::")
        raise BindingError(
            f"{where}: kernel_name {name} means the C++ function {meant}; "
            f"code generation adds native itself: write {plain}"
        )
    return name


def _refuse_duplicates(path: Path, entries: Sequence[BindingEntry]) -> None:
    by_bare_name: dict[str, BindingEntry] = {}
    for entry in entries:
        bare = entry.name.partition("::")[2]
        earlier = by_bare_name.setdefault(bare, entry)
        if earlier is entry:
            continue
        if earlier.name == entry.name:
            raise BindingError(
                f"{path} binds {entry.name} twice, to {earlier.kernel_name} and to {entry.kernel_name}; "
                "a second registration ends the process. Remove one"
            )
        raise BindingError(
            f"{path} binds {earlier.name} and {entry.name}; code generation tells operators apart by name and overload "
            "only. Put them into folders of their own, or rename one"
        )


def select_all(entries: Sequence[BindingEntry]) -> Selection:
    return Selection(tuple(entry.name for entry in entries), "all")


def select_names(entries: Sequence[BindingEntry], names: Sequence[str]) -> Selection:
    """Return the named operators: ``my_ops::mul3.out``, ``my_ops::mul3`` or ``mul3``."""
    chosen: list[str] = []
    for word in names:
        matches = [entry.name for entry in entries if word in _spellings(entry.name)]
        if not matches:
            raise UnknownNameError("operator", word, [entry.name for entry in entries], "bound in the YAML file")
        chosen += [name for name in matches if name not in chosen]
    return Selection(tuple(chosen), "named")


def _spellings(name: str) -> set[str]:
    without_overload, without_namespace = name.partition(".")[0], name.partition("::")[2]
    return {name, without_overload, without_namespace, without_namespace.partition(".")[0]}


def select_for_model(entries: Sequence[BindingEntry], model: Path) -> Selection:
    """Return the operators that a ``.pte`` needs; raise if one has no entry."""
    needed = custom_operators(program_operators(model))
    known = [entry.name for entry in entries]
    if missing := [name for name in needed if name not in known]:
        raise BindingError(
            f"{model} needs {', '.join(missing)}, and no entry binds it to a kernel; known: {', '.join(known)}. "
            "Add an entry with func and kernels, and the kernel"
        )
    return Selection(tuple(name for name in known if name in needed), f"of {model.name}")


def custom_operators(names: Sequence[str]) -> list[str]:
    """Return the operators whose kernels do not come with ExecuTorch."""
    return [name for name in names if name.partition("::")[0] not in RUNTIME_NAMESPACES]
