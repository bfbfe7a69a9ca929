"""Create the folders of a kernel directory, each with a template to fill in."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from opforge.backends.directory import implementation_files
from opforge.cases import Case
from opforge.errors import OpforgeError
from opforge.ops import Operator, SchemaKind, table


def scaffold(root: Path, cases: Mapping[str, Sequence[Case]]) -> tuple[list[Path], list[Path]]:
    """Write a kernel template for each packet in the cases; return new files and kept folders."""
    new_files: list[Path] = []
    kept_folders: list[Path] = []
    for name in dict.fromkeys(table().folder_of(op) for name in cases if (op := table().get(name)) is not None):
        folder = root / name
        if implementation_files(folder):
            kept_folders.append(folder)
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OpforgeError(f"folder {str(folder)!r} cannot be made: {error.strerror}") from None
        path = folder / f"{name}_implementation_1.py"
        path.write_text(
            render(name, root, [c.args for op in cases if op.startswith(f"{name}.") for c in cases[op][:1]])
        )
        new_files.append(path)
    return new_files, kept_folders


def render(name: str, root: Path, cases: Sequence[str]) -> str:
    """Return the source of a kernel template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # Python source
    )
    op = table().resolve(name)
    family, others = table().served_by(name)
    return environment.get_template("kernel.py.j2").render(
        op=op,
        entry=f"{op.base}_kernel_impl",
        signature=python_signature(op),
        family=[o.name for o in family if o.kind is not SchemaKind.MUTABLE],
        others=[o.name for o in others],
        root=root,
        cases=cases,
    )


_PYTHON_CONSTANTS = {"contiguous_format": "torch.contiguous_format", "Mean": "1", "long": "torch.long"}


def python_signature(op: Operator) -> str:
    """Return the parameters of an operator as Python source."""
    parts = []
    starred = False
    for argument in op.arguments:
        if argument.kwarg_only and not starred:
            parts.append("*")
            starred = True
        name = f"{argument.name}_" if argument.name in ("from", "in", "is", "lambda") else argument.name
        if argument.default is None:
            parts.append(name)
        else:
            default = _PYTHON_CONSTANTS.get(argument.default, argument.default)
            parts.append(f"{name}={_python_default(default)}")
    return ", ".join(parts)


def _python_default(text: str) -> str:
    if text.startswith("torch."):
        return text
    try:
        value = ast.literal_eval(text)
    except ValueError:
        return repr(text)
    return repr(tuple(value) if isinstance(value, list) else value)
