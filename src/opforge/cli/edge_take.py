"""`opforge edge take`: operators of a package go to the device; all but the body of the kernel is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("take")(take)


def take(
    package: Annotated[str, typer.Argument(help="Import name of the package that registers the operators.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", help="An operator of the package, such as swiglu. May be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")] = Path("edge"),
) -> int:
    """Make an ExecuTorch operator folder for an installed package's operators; you write only the C++ kernels."""
    from opforge.edge.from_package import create_from_package

    files = create_from_package(package, op or [], out)
    sys.stdout.write(f"made {out}, {len(files)} files; next:\n")
    for path in files:
        if path.suffix == ".cpp":
            sys.stdout.write(f"  write the kernel in {out / path}\n")
    sys.stdout.write(f"  opforge edge check {out}\n")
    return 0
