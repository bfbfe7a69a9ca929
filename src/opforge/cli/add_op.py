"""`opforge add-op`: another operator for a package that `opforge new` made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError


def register(app: typer.Typer) -> None:
    app.command("add-op")(add_op)


def add_op(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the operator, such as scale, or its schema: 'scale(Tensor x, float a=1.0) -> Tensor'."
        ),
    ],
    mutates: Annotated[bool, typer.Option("--mutates", help="Write the first result into the argument x.")] = False,
    outputs: Annotated[
        int | None, typer.Option(help="Number of new tensors to return (default: 1; with --mutates 0).")
    ] = None,
    optional: Annotated[
        list[str] | None,
        typer.Option(help="Name of an optional tensor argument. May be repeated, or a list with commas."),
    ] = None,
    package: Annotated[Path, typer.Option(help="The package's folder.")] = Path(),
) -> int:
    """Add an operator to a package: kernel, registration, fake, gradient, tests, export, types; existing parts stay."""
    from opforge.package import add_op as scaffold

    if "(" in name and (mutates or outputs is not None or optional):
        raise OpforgeError(
            f"{name!r} is a schema, which says all that --mutates, --outputs and --optional say; leave them out"
        )
    names = [word.strip() for words in optional or [] for word in words.split(",")]
    existing = scaffold.read_package(package)
    wanted = (
        scaffold.schema_request(name)
        if "(" in name
        else scaffold.operator_request(name, mutates=mutates, outputs=outputs, optional=names)
    )
    parts = scaffold.add_op(existing, wanted)
    for part in parts:
        sys.stdout.write(f"{part.status:<8}  {part.path}\n")
    if all(part.status == "kept" for part in parts):
        sys.stdout.write(f"operator {existing.name}::{wanted.op} is already complete\n")
        return 0
    kernel = parts[0].path
    build = "" if existing.variant == "triton" else "  pip install --no-build-isolation -e '.[test]'\n"
    sys.stdout.write(
        f"operator {existing.name}::{wanted.op} multiplies for now; write your computation in {kernel}\n"
        f"{build}  pytest tests/test_{wanted.op}.py\n"
    )
    return 0
