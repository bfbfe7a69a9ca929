"""`opforge edge take`: operators of a package go to the device; all but the body of the kernel is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("take")(take)


def take(
    package: Annotated[str, typer.Argument(help="The package that registers the operators, as it is imported.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", help="An operator of it, such as swiglu. May be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder that is made.")] = Path("edge"),
) -> int:
    """Make a folder that takes operators of an installed package to ExecuTorch; only the C++ kernel is left to write."""
    from opforge.edge.take import take as make

    files = make(package, op or [], out)
    sys.stdout.write(f"made {out}, {len(files)} files; next:\n")
    for path in files:
        if path.suffix == ".cpp":
            sys.stdout.write(f"  write the kernel in {out / path}\n")
    sys.stdout.write(f"  opforge edge check {out}\n")
    return 0
