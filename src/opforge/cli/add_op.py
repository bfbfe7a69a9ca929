"""`opforge add-op`: another operator for a package that `opforge new` made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("add-op")(add_op)


def add_op(
    name: Annotated[str, typer.Argument(help="Name of the operator, such as scale, or scale_ when it writes.")],
    mutates: Annotated[bool, typer.Option("--mutates", help="It writes its first result into its argument x.")] = False,
    outputs: Annotated[
        int | None, typer.Option(help="How many new tensors it returns: 1 unless given, with --mutates none.")
    ] = None,
    optional: Annotated[
        list[str] | None,
        typer.Option(help="Name of a tensor that may be left out. May be repeated, or a list with commas."),
    ] = None,
    package: Annotated[Path, typer.Option(help="The package's folder.")] = Path(),
) -> int:
    """Add kernel, registration, fake, gradient, tests, export and types of an operator; what is there already is kept."""
    from opforge.authoring import add_op as adding

    names = [word.strip() for words in optional or [] for word in words.split(",")]
    found = adding.package_at(package)
    wanted = adding.wish(name, mutates=mutates, outputs=outputs, optional=names)
    parts = adding.add_op(found, wanted)
    for part in parts:
        sys.stdout.write(f"{part.status:<8}  {part.path}\n")
    if all(part.status == "kept" for part in parts):
        sys.stdout.write(f"operator {found.name}::{name} is complete already\n")
        return 0
    kernel = parts[0].path
    build = "" if found.variant == "triton" else "  pip install --no-build-isolation -e '.[test]'\n"
    sys.stdout.write(
        f"operator {found.name}::{name} multiplies; have it compute what you want in {kernel}\n{build}  pytest tests/test_{name}.py\n"
    )
    return 0
