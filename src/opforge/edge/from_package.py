"""Create an operator folder for operators of an existing package, such as one of `opforge new`.

Everything for ExecuTorch is written except the bodies of the kernels. Needs no torch.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from opforge.edge.child import ask
from opforge.edge.codegen import generate_registration
from opforge.edge.folders import write_folder
from opforge.edge.schemas import out_variant
from opforge.edge.selection import Selection
from opforge.errors import OpforgeError

TEMPLATES = Path(__file__).parent / "templates" / "taken"
_FILES = ("ops.py", "ops.yaml", "model.py")
_EXAMPLE_VALUES = {
    "Tensor": "", "int": "1", "float": "0.5", "bool": "False", "str": '""', "number": "2", "Optional[Tensor]": "None", "List[int]": "[1]",
    "List[float]": "[0.5]",
}  # fmt: skip
"""Values by type for arguments without a default, in the generated model.

A tensor becomes an input.
"""


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


def create_from_package(package: str, ops: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Create an operator folder for operators of an installed package, and return its files.

    The user writes the bodies of the kernels.
    """
    if not ops:
        raise OpforgeError(f"name the operators of {package} to run on the device, such as --op swiglu")
    request = {"package": package, "ops": list(ops), "folder": str(Path.cwd())}
    rows = ask("take_child", request, label=f"importing {package}")["ops"]
    taken = [_package_operator(row) for row in rows]
    texts = _texts(package, taken)
    declarations = _declarations(texts["ops.yaml"], taken)
    kernel = _environment().get_template("kernels/op.cpp.j2")
    for operator in taken:
        declared = PackageOperator(
            operator.name,
            operator.out,
            operator.outputs,
            operator.call,
            operator.model_inputs,
            declarations[operator.name],
        )
        texts[f"kernels/{operator.base}.cpp"] = kernel.render(op=declared)
    return write_folder(folder, texts)


def _package_operator(row: dict[str, Any]) -> PackageOperator:
    if "!" in row["schema"]:
        raise OpforgeError(
            f"{row['name']} writes to an argument; take operators that return new tensors: export replaces the others"
        )
    form = out_variant(row["schema"])
    call, parameters = [], []
    for argument in row["arguments"]:
        if not argument["required"]:
            continue
        value = _EXAMPLE_VALUES.get(argument["type"])
        if value is None:
            raise OpforgeError(
                f"{row['name']} has the argument {argument['name']} of type {argument['type']}, for which no value can be generated; "
                "write the folder by hand, as `opforge edge init` makes one"
            )
        if not value:
            value = f"{form.name}_{argument['name']}"
            parameters.append(value)
        call.append(f"{argument['name']}={value}" if argument["keyword"] else value)
    return PackageOperator(
        row["name"], f"{form.namespace}::{form.out_schema}", form.out_arguments, tuple(call), tuple(parameters)
    )


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # noqa: S701  # source files
    )


def _texts(package: str, taken: Sequence[PackageOperator]) -> dict[str, str]:
    environment = _environment()
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
