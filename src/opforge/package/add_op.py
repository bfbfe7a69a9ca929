"""Add an operator to a package made from the template.

This covers kernel, registration, fake, gradient, tests, export and types.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from opforge.errors import OpforgeError
from opforge.package import edits, names
from opforge.package.schema import Argument, Schema, parse

MAX_OUTPUTS = 8


@dataclass(frozen=True, slots=True)
class TemplatePackage:
    """A package made from the template."""

    folder: Path
    name: str
    variant: str
    abi: str


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """The requested form of an operator."""

    op: str
    mutates: bool = False
    outputs: int = 1
    """Number of new results, not counting an argument that is written to."""
    optional: tuple[str, ...] = ()
    schema: Schema | None = None
    """The schema that was given instead of the other options."""

    def command(self) -> str:
        """Return the command that adds this operator; stored in the files and compared later."""
        if self.schema is not None:
            return f"opforge add-op '{self.schema.text}'"
        default_outputs = 0 if self.mutates else 1
        words = ["opforge add-op", self.op, *(["--mutates"] if self.mutates else [])]
        words += [f"--outputs {self.outputs}"] if self.outputs != default_outputs else []
        return " ".join([*words, *(f"--optional {name}" for name in self.optional)])


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file of an operator, or a file that lists it."""

    path: Path
    status: str
    """``made``, ``extended`` or ``kept`` (nothing missing)."""


def operator_request(
    op: str, *, mutates: bool = False, outputs: int | None = None, optional: Sequence[str] = ()
) -> OperatorRequest:
    """Return a valid request; raise OpforgeError for an invalid option."""
    names.check_operator_name(op)
    for name in optional:
        names.check_argument_name(name, op)
    if len(set(optional)) < len(optional):
        raise OpforgeError(f"an optional argument is given twice: {', '.join(optional)}; each needs a name of its own")
    min_outputs = 0 if mutates else 1
    count = min_outputs if outputs is None else outputs
    if not min_outputs <= count <= MAX_OUTPUTS:
        raise OpforgeError(f"--outputs {count} is out of range; it must be {min_outputs} to {MAX_OUTPUTS}")
    return OperatorRequest(op, mutates, count, tuple(optional))


def schema_request(text: str) -> OperatorRequest:
    """Return the request of a schema; raise OpforgeError for what cannot be generated."""
    schema = parse(text)
    names.check_operator_name(schema.op)
    model = schema.tensors[0].name if schema.tensors else ""
    for argument in schema.arguments:
        if (argument.name, model) != ("x", "x"):
            names.check_argument_name(argument.name, schema.op, "argument")
    if schema.outputs > MAX_OUTPUTS:
        raise OpforgeError(f"{schema.text!r} returns {schema.outputs} tensors; at most {MAX_OUTPUTS} are generated")
    return OperatorRequest(schema.op, schema.mutates, schema.outputs, (), schema)


def _as_schema(request: OperatorRequest) -> Schema:
    """Return the schema of a request, which one without has: x, and the optional tensors."""
    if request.schema is not None:
        return request.schema
    arguments = (Argument("x", "Tensor"), *(Argument(name, "Tensor?", "None") for name in request.optional))
    words = [f"{a.type}{'(a!)' if a.name == 'x' and request.mutates else ''} {a.name}" for a in arguments]
    words = [f"{word}=None" if a.optional else word for word, a in zip(words, arguments, strict=True)]
    returns = "Tensor" if request.outputs == 1 else f"({', '.join(['Tensor'] * request.outputs)})"
    text = f"{request.op}({', '.join(words)}) -> {returns}"
    return Schema(request.op, text, arguments, request.mutates, request.outputs)


def read_package(folder: Path) -> TemplatePackage:
    """Return the package in a folder; its ``pyproject.toml`` must have ``[tool.opforge]``."""
    path = folder / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text()).get("tool", {}).get("opforge")
    except FileNotFoundError:
        table = None
    except (OSError, ValueError) as error:
        raise OpforgeError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise OpforgeError(
            f"{str(folder)!r} was not made by `opforge new`: there is no [tool.opforge] in its pyproject.toml; "
            "go to the package's folder, or name it with --package"
        )
    name, variant, abi = (
        str(table.get(key, default)) for key, default in (("package", ""), ("variant", ""), ("abi", "stable"))
    )
    if variant not in ("triton", "cpp") or abi not in ("stable", "full"):
        raise OpforgeError(
            f"[tool.opforge] in {str(path)!r} says variant {variant!r}, abi {abi!r}; allowed: triton or cpp, stable "
            "or full"
        )
    if not name.isidentifier() or not (folder / "src" / name / "ops" / "__init__.py").is_file():
        raise OpforgeError(
            f"[tool.opforge] in {str(path)!r} says package {name!r}, but there is no src/{name}/ops/__init__.py; "
            "correct it"
        )
    return TemplatePackage(folder, name, variant, abi)


def add_op(package: TemplatePackage, request: OperatorRequest) -> list[FileChange]:
    """Add the missing files and entries of an operator.

    Existing files of the operator stay unchanged. A failure leaves the package unchanged.
    """
    files = _operator_files(package, request)
    _refuse_registered(package, request)
    _refuse_old_launch(package, request)
    _refuse_other_options(files, request)
    new = {path: _render(template, package, request) for path, template in files.items() if not path.exists()}
    lists = _files_listing_operators(package, request)
    changed = {path: text for path, text in lists.items() if text != _read(path)}
    parts = [FileChange(path, "made" if path in new else "kept") for path in files]
    parts += [FileChange(path, "extended" if path in changed else "kept") for path in lists]
    _write_all({**new, **changed})
    return parts


def _refuse_registered(package: TemplatePackage, request: OperatorRequest) -> None:
    """Reject an operator that another file registers or that was not added by this command."""
    name = f"{package.name}::{request.op}"
    own_file = package.folder / "src" / package.name / "ops" / f"{request.op}.py"
    for path in sorted(own_file.parent.glob("*.py")):
        if path != own_file and f'"{name}"' in _read(path):
            raise OpforgeError(f"operator {name} is registered in {path} already; choose another name")
    if own_file.exists() and _creating_command(own_file) is None:
        raise OpforgeError(
            f"operator {name} is in {own_file} already, and was not added by this command; choose another name"
        )


def _refuse_old_launch(package: TemplatePackage, request: OperatorRequest) -> None:
    """Reject a schema in a package of Triton kernels that cannot register one yet."""
    path = package.folder / "src" / package.name / "kernels" / "launch.py"
    if package.variant == "triton" and request.schema is not None and "schema: str" not in _read(path):
        raise OpforgeError(
            f"operator() in {path} has no parameter schema; copy that file from a package that this `opforge new` makes"
        )


def _refuse_other_options(files: Iterable[Path], request: OperatorRequest) -> None:
    """Reject an operator that was added with other options."""
    for path in files:
        if path.exists() and (command := _creating_command(path)) not in (None, request.command()):
            raise OpforgeError(
                f"{path} exists already, made by `{command}`, not by `{request.command()}`; "
                "choose another name, or remove the files of that operator first"
            )


def _creating_command(path: Path) -> str | None:
    """Return the command that made a file, from a comment in it."""
    match = re.search(r"^(?:#|//) (opforge add-op .*)$", _read(path), re.MULTILINE)
    return match[1] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise OpforgeError(f"{str(path)!r} cannot be read: {error}") from None


def _operator_files(package: TemplatePackage, request: OperatorRequest) -> dict[Path, str]:
    """Return the files of an operator with their templates."""
    source, op = package.folder / "src", request.op
    if package.variant == "triton":
        kernels = {source / package.name / "kernels" / f"{op}.py": "kernel.py.j2"}
    else:
        kernels = {source / "csrc" / f"{op}.cpp": "op.cpp.j2", source / "csrc" / f"{op}.cu": "op.cu.j2"}
    tests, operators = package.folder / "tests" / f"test_{op}.py", source / package.name / "ops" / f"{op}.py"
    if not _as_schema(request).tensors:
        made = {} if package.variant == "triton" else {source / "csrc" / f"{op}.cpp": "factory.cpp.j2"}
        return {**made, operators: "factory_ops.py.j2", tests: "factory_test.py.j2"}
    return {**kernels, operators: "ops.py.j2", tests: "test.py.j2"}


def _files_listing_operators(package: TemplatePackage, request: OperatorRequest) -> dict[Path, str]:
    """Return the files that list all operators, with this operator added."""
    source = package.folder / "src" / package.name
    exports, types = source / "ops" / "__init__.py", source / "namespace.py"
    if not types.is_file():
        raise OpforgeError(
            f"there is no {types}, which holds the types of operators; copy it from a package that `opforge new` makes"
        )
    parameters = [argument.parameter("...") for argument in _as_schema(request).arguments]
    return {
        exports: edits.with_export(_read(exports), str(exports), request.op),
        types: edits.with_method(_read(types), str(types), request.op, parameters, _return_type(request.outputs)),
    }


def _return_type(count: int) -> str:
    return "None" if count == 0 else "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _render(template: str, package: TemplatePackage, request: OperatorRequest) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "operator"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701  # source files
    )
    environment.globals["folded"] = edits.fold_line
    return environment.get_template(template).render(**_template_values(package, request))


def _template_values(package: TemplatePackage, request: OperatorRequest) -> dict[str, Any]:
    """Return the values for the templates.

    Result k is ``(k + 2) * x``, plus all other tensors and numbers; for an operator that mutates, result 0 is written
    to x.
    """
    schema, first = _as_schema(request), 1 if request.mutates else 0
    tensors = [argument.name for argument in schema.tensors]
    extras, dims, numbers = schema.tensors[1:], schema.dims, schema.numbers
    optional = [argument.name for argument in extras if argument.optional]
    results = [f"y{k}" for k in range(first, first + request.outputs)]
    grads = ["grad"] if request.outputs == 1 else [f"grad_{k}" for k in range(request.outputs)]
    pointers = [f"{name}_ptr" for name in ("x", *(argument.name for argument in extras), *results)]
    sizes = ["count", *(["width"] if dims else []), *(["shift"] if numbers else [])]
    flags = [f"HAS_{name.upper()}: tl.constexpr" for name in optional]
    bare = [replace(argument, default=None).parameter() for argument in schema.tensors]
    values = schema.test_values()
    every = [f'NUMBERS["{a.name}"]' if a.name in values else a.name for a in schema.arguments]
    return {
        "package": package.name, "variant": package.variant, "abi": package.abi, "line": request.command(),
        "op": request.op, "mutates": request.mutates, "outputs": request.outputs,
        "schema": schema.text, "schema_types": schema.text[len(schema.op) :],
        "schema_given": request.schema is not None,
        "arguments": schema.arguments, "positions": {a.name: k for k, a in enumerate(schema.arguments)},
        "model": tensors[0] if tensors else "", "tensors": ", ".join(tensors), "tensor_names": tensors,
        "tensor_parameters": [f"{a.name}=None" if a.optional else a.name for a in schema.tensors],
        "extras": extras, "optional": optional, "required_count": len(tensors) - len(optional),
        "numbers": numbers, "dims": dims, "keepdim": schema.keepdim, "size": schema.size,
        "has_extra": bool(extras or numbers),
        "call": ", ".join(f"list({a.name})" if a.is_list else a.name for a in schema.arguments),
        "parameters": [a.parameter(tuples=True) for a in schema.arguments],
        "op_parameters": [a.parameter("()" if a.is_list else "", tuples=True) for a in schema.arguments],
        "bare_parameters": bare, "kernel_parameters": [*pointers, *sizes, *flags, "BLOCK: tl.constexpr"],
        "cpp_type": _cpp_type(request.outputs),
        "cpp_parameters": [_cpp_parameter(a, package, tensors) for a in schema.arguments],
        "shift": _sum_of(numbers, "arg_{}", "total(arg_{})") or "0",
        "shift_python": _sum_of(numbers, "float({})", "float(sum({}))") or "0.0",
        "shift_of_numbers": _sum_of(numbers, 'NUMBERS["{}"]', 'sum(NUMBERS["{}"])'),
        "values": [f'"{name}": {value!r}' for name, value in values.items()], "complete": every,
        "results": results, "grads": grads, "gradient_parameters": ["ctx: Any", *(f"{grad}: Tensor" for grad in grads)],
        "out_dims": ("None", "0")[request.outputs] if request.outputs < 2 else f"({', '.join('0' * request.outputs)})",
        "factors": [k + 2 for k in range(first + request.outputs)], "type": _return_type(request.outputs),
    }  # fmt: skip


def _sum_of(numbers: Sequence[Argument], one: str, many: str) -> str:
    """Return the sum of numbers and lists as an expression; empty if there are none."""
    return " + ".join((many if argument.is_list else one).format(argument.name) for argument in numbers)


def _cpp_type(outputs: int) -> str:
    return "void" if outputs == 0 else "Tensor" if outputs == 1 else f"std::tuple<{', '.join(['Tensor'] * outputs)}>"


def _cpp_parameter(argument: Argument, package: TemplatePackage, tensors: Sequence[str]) -> str:
    if tensors[:1] == [argument.name]:
        return "const Tensor& x"
    element = {"int[]": "int64_t", "float[]": "double"}.get(argument.type, "")
    of_list = f"const std::vector<{element}>&" if package.abi == "stable" else f"at::ArrayRef<{element}>"
    types = {"Tensor": "const Tensor&", "Tensor?": "const std::optional<Tensor>&", "int": "int64_t", "float": "double"}
    return f"{of_list if element else types.get(argument.type, argument.type)} arg_{argument.name}"


def _write_all(texts: dict[Path, str]) -> None:
    """Write all files or none: if one fails, restore those already written."""
    old_texts: dict[Path, str | None] = {}
    try:
        for path, text in texts.items():
            old_text = path.read_text() if path.exists() else None
            _write(path, text)
            old_texts[path] = old_text
    except BaseException as error:
        for path, old_text in old_texts.items():
            path.unlink() if old_text is None else _write(path, old_text)
        if isinstance(error, OSError):
            raise OpforgeError(
                f"{str(error.filename)!r} cannot be written: {error.strerror}; nothing was changed"
            ) from None
        raise


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(text)
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
