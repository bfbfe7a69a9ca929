"""Create an operator folder for operators of an existing package, such as one of `opforge new`.

Everything for ExecuTorch is written except the bodies of the kernels. Only the step of the child
needs torch.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opforge.edge.bindings import Selection
from opforge.edge.build import generate_registration
from opforge.edge.child import Message, ask, user_code
from opforge.edge.init import write_folder
from opforge.edge.out_variants import out_variant
from opforge.edge.toolchain import templates
from opforge.errors import OpforgeError, UnknownNameError

_FILES = ("ops.py", "ops.yaml", "model.py")
_EXAMPLE_VALUES = {
    "Tensor": "", "int": "1", "float": "0.5", "bool": "False", "str": '""', "number": "2",
    "Optional[Tensor]": "None", "List[int]": "[1]", "List[float]": "[0.5]",
}  # fmt: skip
"""Values by type for arguments without a default, in the generated model.

A tensor becomes an input.
"""


@dataclass(frozen=True, slots=True)
class PackageQuestion(Message):
    """Operators of a package, by name."""

    package: str
    ops: tuple[str, ...]
    folder: Path
    """Folder to import from, besides installed packages."""


@dataclass(frozen=True, slots=True)
class RegisteredArgument:
    """An argument of a registered operator."""

    name: str
    type: str
    required: bool
    keyword: bool
    """Whether it is given by keyword only."""


@dataclass(frozen=True, slots=True)
class RegisteredOperator:
    """An operator that a package registers."""

    name: str
    schema: str
    arguments: tuple[RegisteredArgument, ...]


@dataclass(frozen=True, slots=True)
class PackageAnswer(Message):
    """The operators asked for."""

    operators: tuple[RegisteredOperator, ...]


@dataclass(frozen=True, slots=True)
class PackageOperator:
    """One operator, as the templates use it."""

    name: str
    out: str
    """Schema of the out variant, with the namespace."""
    outputs: tuple[str, ...]
    call: tuple[str, ...]
    """Arguments of its call in the model."""
    model_inputs: tuple[str, ...]
    """Inputs of the model for it."""
    declaration: str = ""
    """Declaration of the C++ function."""

    @property
    def namespace(self) -> str:
        return self.name.partition("::")[0]

    @property
    def base(self) -> str:
        return self.name.partition("::")[2]

    @property
    def results(self) -> int:
        return len(self.outputs)

    @property
    def returned(self) -> str:
        return f"std::tuple<{', '.join(['Tensor&'] * self.results)}>"

    @property
    def answer(self) -> str:
        """Return the expression that the C++ function returns."""
        return "results" if self.results > 1 else "out"


_UNWRITTEN = re.compile(r"ET_KERNEL_CHECK_MSG\(context, false, NotImplemented,.* is not written yet\"\);")


def is_unwritten(source: str) -> bool:
    """Whether a C++ source still has the line with which a new kernel refuses to run."""
    return _UNWRITTEN.search(source) is not None


def create_from_package(package: str, ops: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Create an operator folder for operators of an installed package, and return its files.

    The user writes the bodies of the kernels.
    """
    if not ops:
        raise OpforgeError(f"name the operators of {package} to run on the device, such as --op swiglu")
    question = PackageQuestion(package, tuple(ops), Path.cwd())
    registered = ask(describe_operators, question, label=f"importing {package}").operators
    taken = [_package_operator(operator) for operator in registered]
    texts = _texts(package, taken)
    declarations = _declarations(texts["ops.yaml"], taken)
    kernel = templates("taken").get_template("kernels/op.cpp.j2")
    for operator in taken:
        declared = replace(operator, declaration=declarations[operator.name])
        texts[f"kernels/{operator.base}.cpp"] = kernel.render(op=declared)
    return write_folder(folder, texts)


def describe_operators(question: PackageQuestion) -> PackageAnswer:
    """Import a package, and describe operators that it registers: a step of the child."""
    from torch._C import _dispatch_get_all_op_names as registered_names
    from torch._C import _get_schema as schema_of

    from opforge.sandbox.guest.loader import describe_exception

    package = question.package
    sys.path.insert(0, str(question.folder))
    before = set(registered_names())
    label = f"the package {package} cannot be imported"
    with user_code(lambda error: OpforgeError(f"{label}: {describe_exception(error)}")):
        importlib.import_module(package)
    added = [name for name in sorted(set(registered_names()) - before) if "." not in name]
    if not added:
        raise OpforgeError(f"importing {package} registers no operator; give the package that registers it")
    return PackageAnswer(tuple(_described(name, schema_of(name, "")) for name in _chosen(added, question.ops)))


def _chosen(names: Sequence[str], requested: Iterable[str]) -> list[str]:
    """Return the requested operators. Requests may omit the namespace."""
    chosen = []
    for word in requested:
        matches = [name for name in names if word in (name, name.partition("::")[2])]
        if not matches:
            raise UnknownNameError("operator", word, [name.partition("::")[2] for name in names])
        chosen += matches
    return list(dict.fromkeys(chosen))


def _described(name: str, schema: Any) -> RegisteredOperator:
    arguments = (
        RegisteredArgument(
            argument.name, str(argument.type), not argument.has_default_value(), bool(argument.kwarg_only)
        )
        for argument in schema.arguments
    )
    return RegisteredOperator(name, str(schema), tuple(arguments))


def _package_operator(operator: RegisteredOperator) -> PackageOperator:
    if "!" in operator.schema:
        raise OpforgeError(
            f"{operator.name} writes to an argument; take operators that return new tensors: export replaces the others"
        )
    form = out_variant(operator.schema)
    call, parameters = [], []
    for argument in operator.arguments:
        if not argument.required:
            continue
        value = _EXAMPLE_VALUES.get(argument.type)
        if value is None:
            raise OpforgeError(
                f"{operator.name} has the argument {argument.name} of type {argument.type}, "
                "for which no value can be generated; write the folder by hand, as `opforge edge init` makes one"
            )
        if not value:
            value = f"{form.name}_{argument.name}"
            parameters.append(value)
        call.append(f"{argument.name}={value}" if argument.keyword else value)
    return PackageOperator(
        operator.name, f"{form.namespace}::{form.out_schema}", form.out_arguments, tuple(call), tuple(parameters)
    )


def _texts(package: str, taken: Sequence[PackageOperator]) -> dict[str, str]:
    environment = templates("taken")
    parameters = [name for operator in taken for name in operator.model_inputs]
    return {
        file: environment.get_template(f"{file}.j2").render(package=package, ops=taken, parameters=parameters)
        for file in _FILES
    }


def _declarations(bindings: str, taken: Sequence[PackageOperator]) -> dict[str, str]:
    """Return the C++ declaration of each kernel, from generated code."""
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as place:
        path = Path(place) / "ops.yaml"
        path.write_text(bindings)
        names = tuple(f"{operator.name}.out" for operator in taken)
        generated = generate_registration(path, Selection(names, "taken"), Path(place) / "generated")
        text = (generated.folder / "NativeFunctions.h").read_text()
    return {operator.name: _declaration(text, operator.base) for operator in taken}


def _declaration(text: str, base: str) -> str:
    """Return the declaration that takes a context, with the short names of the kernel's file."""
    match = re.search(rf"^(.*\b{base}_out\(torch::executor::KernelRuntimeContext & context.*\));$", text, re.MULTILINE)
    if match is None:
        raise OpforgeError(f"code generation declares no kernel for {base}")
    plain = (
        match[1].replace("torch::executor::", "").replace(" & ", "& ").replace(" &", "&").replace(",Tensor", ", Tensor")
    )
    return plain.replace("::std::", "std::")
