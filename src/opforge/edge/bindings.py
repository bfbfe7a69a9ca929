"""Read the YAML file that binds operators to C++ kernels, and select operators of it.

Entries that ExecuTorch cannot use are rejected. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
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
_FIELDS = ("func", "kernels", "variants", "type_alias", "dim_order_alias")
_DTYPES = ("Byte", "Char", "Short", "Int", "Long", "Float", "Double", "Bool")
"""Dtypes that a kernel of its own may have: code generation knows no others."""


class BindingError(OpforgeError):
    """An entry of the YAML file cannot work."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class KernelBinding:
    """One kernel of an operator."""

    name: str
    """As in the file: ``my_ops::mul3_out``."""
    arg_meta: dict[str, tuple[str, ...]] | None = None
    """By tensor: the aliases of its dtypes and of its dimension order; None serves what no other kernel serves."""

    @property
    def function(self) -> str:
        return self.name.rpartition("::")[2]

    @property
    def cpp_function(self) -> str:
        """Return the C++ function called: code generation adds ``native`` before the last part."""
        namespace, _, name = self.name.rpartition("::")
        return f"{namespace}::native::{name}"


def _as_described(arg_meta: dict[str, tuple[str, ...]], results: int) -> dict[str, list[str]]:
    """Return the description of a call that the runtime looks for, under names that the generator sorts.

    A single result is the last argument once more; several are a list, which is left out.
    """
    described = [*arg_meta.values(), *([list(arg_meta.values())[-1]] if results == 1 else [])]
    return {f"tensor{number:02}": list(words) for number, words in enumerate(described)}


@dataclass(frozen=True, slots=True)
class BindingEntry:
    """One operator with its kernels."""

    name: str
    """With namespace and overload: ``my_ops::mul3.out``."""
    schema: str
    """As in the file, with the namespace."""
    kernels: tuple[KernelBinding, ...]
    type_alias: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dim_order_alias: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_specialized(self) -> bool:
        """Whether a kernel serves some dtypes and dimension orders only."""
        return any(kernel.arg_meta is not None for kernel in self.kernels)

    @property
    def registrations(self) -> int:
        """Return how many kernels are registered: one for each combination of dtypes."""
        return sum(len(self.keys(kernel)) for kernel in self.kernels)

    def keys(self, kernel: KernelBinding) -> list[Any]:
        """Return the dtypes and dimension orders that a kernel serves; None is anything."""
        if kernel.arg_meta is None:
            return [None]
        aliases = list(dict.fromkeys(dtype for dtype, _order in kernel.arg_meta.values()))
        choices = (
            dict(zip(aliases, dtypes, strict=True)) for dtypes in product(*(self.type_alias[a] for a in aliases))
        )
        return [
            tuple((chosen[dtype], self.dim_order_alias[order]) for dtype, order in kernel.arg_meta.values())
            for chosen in choices
        ]

    def as_row(self, kernels: Sequence[KernelBinding], *, specialized: bool = True) -> dict[str, Any]:
        """Return the entry in the form of the YAML file, with some of its kernels."""
        row: dict[str, Any] = {"func": self.schema}
        if specialized and self.is_specialized:
            row["type_alias"] = {name: list(dtypes) for name, dtypes in self.type_alias.items()}
            row["dim_order_alias"] = {name: list(order) for name, order in self.dim_order_alias.items()}
        results = len(parse_schema(self.schema.partition("::")[2]).arguments.out)
        metas = [
            _as_described(kernel.arg_meta, results) if specialized and kernel.arg_meta else None for kernel in kernels
        ]
        row["kernels"] = [
            {"arg_meta": meta, "kernel_name": kernel.name} for meta, kernel in zip(metas, kernels, strict=True)
        ]
        return row

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
        raise BindingError(f"{where} has the field {unknown[0]!r}; allowed: func, kernels, type_alias, dim_order_alias")
    kernels, tensors = row.get("kernels"), _tensor_arguments(schema)
    if not isinstance(kernels, list) or not kernels or not all(isinstance(kernel, dict) for kernel in kernels):
        raise BindingError(f"{where} must have kernels, each with arg_meta and kernel_name (arg_meta: null for all)")
    bound = tuple(
        KernelBinding(_kernel_name(kernel.get("kernel_name"), where), _arg_meta(kernel.get("arg_meta"), tensors, where))
        for kernel in kernels
    )
    dtypes = _aliases(row.get("type_alias"), "type_alias", _is_dtypes, f"dtypes of {', '.join(_DTYPES)}", where)
    orders = _aliases(row.get("dim_order_alias"), "dim_order_alias", _is_order, "dimensions, as in [0, 1]", where)
    entry = BindingEntry(name, schema, bound, dtypes, orders)
    _check_kernels(entry, where)
    return entry


def _tensor_arguments(schema: str) -> list[str]:
    """Return the names of the tensors in a schema, in order; none if some are optional or lists."""
    arguments = [a for a in parse_schema(schema.partition("::")[2]).arguments.flat_all if "Tensor" in str(a.type)]
    return [a.name for a in arguments] if all(str(a.type) == "Tensor" for a in arguments) else []


def _arg_meta(meta: Any, tensors: Sequence[str], where: str) -> dict[str, tuple[str, ...]] | None:
    if meta is None:
        return None
    if not tensors:
        raise BindingError(
            f"{where}: arg_meta is {meta!r}, and the operator has lists of tensors or optional ones, whose calls the "
            "runtime describes differently each time; give arg_meta: null"
        )
    example = "{" + ", ".join(f"{name}: [T0, D0]" for name in tensors) + "}"
    if not isinstance(meta, dict) or list(meta) != list(tensors):
        raise BindingError(f"{where}: arg_meta is {meta!r}; it names the tensors of the schema in order: {example}")
    for words in meta.values():
        if not isinstance(words, list) or len(words) != 2 or not all(isinstance(word, str) for word in words):
            raise BindingError(
                f"{where}: arg_meta has {words!r}; give the names of a type_alias and a dim_order_alias: {example}"
            )
    return {name: tuple(words) for name, words in meta.items()}


def _aliases(
    rows: Any, field_name: str, is_right: Callable[[Any], bool], allowed: str, where: str
) -> dict[str, tuple[Any, ...]]:
    if not isinstance(rows, dict | None):
        raise BindingError(f"{where}: {field_name} is {rows!r}; it gives names to lists of {allowed}")
    for name, values in (rows or {}).items():
        if not isinstance(name, str) or not isinstance(values, list) or not is_right(values):
            raise BindingError(f"{where}: {field_name} {name!r} is {values!r}; allowed: a list of {allowed}")
    return {name: tuple(values) for name, values in (rows or {}).items()}


def _is_dtypes(values: list[Any]) -> bool:
    return bool(values) and set(map(str, values)) <= set(_DTYPES) and len(set(values)) == len(values)


def _is_order(values: list[Any]) -> bool:
    return all(type(value) is int for value in values) and sorted(values) == list(range(len(values)))


def _check_kernels(entry: BindingEntry, where: str) -> None:
    """Raise if kernels use aliases that are not defined, or serve the same."""
    used = [words for kernel in entry.kernels for words in (kernel.arg_meta or {}).values()]
    for position, field_name in enumerate(("type_alias", "dim_order_alias")):
        aliases: dict[str, Any] = getattr(entry, field_name)
        if unknown := [words[position] for words in used if words[position] not in aliases]:
            known = ", ".join(aliases) or "none"
            raise BindingError(f"{where}: {field_name} does not define {unknown[0]!r}; it defines: {known}")
    served: dict[Any, str] = {}
    for kernel in entry.kernels:
        for key in entry.keys(kernel):
            if key in served:
                raise BindingError(
                    f"{where}: {served[key]} and {kernel.name} serve the same: "
                    f"{'arg_meta null' if key is None else key}; each kernel must differ in dtype or dimension order"
                )
            served[key] = kernel.name
    namespaces = {kernel.name.rpartition("::")[0] for kernel in entry.kernels}
    if len(namespaces) > 1:
        raise BindingError(
            f"{where} has kernels in the namespaces {', '.join(sorted(namespaces))}; code generation wants one"
        )


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


def _kernel_name(name: Any, where: str) -> str:
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
                f"{path} binds {entry.name} twice, to {earlier.kernels[0].name} and to {entry.kernels[0].name}; "
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
