"""`opforge pack`: a directory of kernels becomes a package that pip installs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.errors import OpforgeError


def register(app: typer.Typer) -> None:
    app.command("pack")(pack)


def pack(
    directory: Annotated[Path, typer.Argument(help="A kernel directory, {op}/{op}_implementation_1.py.")],
    name: Annotated[str, typer.Option(help="The name of the package.")],
    out: Annotated[Path, typer.Option(help="Folder for the package and its wheel.")] = Path("dist"),
    version: Annotated[str, typer.Option(help="The version of the package.")] = "0.1.0",
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Make a package and a wheel of a folder's kernels and their proofs; installed, it overrides ATen's kernels."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.package.pack import pack as make_package

    packed = make_package(directory, name, out, version=version)
    if format_ == "json":
        rows = [{"name": k.name, "file": k.file, "proven": k.proven, "plans": k.planned} for k in packed.kernels]
        report = {
            "package": str(packed.project),
            "wheel": str(packed.wheel),
            "kernels": rows,
            "left_out": packed.ignored_folders,
            "signer": packed.signer,
            "native": packed.native,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    for kernel in packed.kernels:
        sys.stdout.write(f"{kernel.name}  {kernel.proven or 'no proof: used only with policy `all`'}\n")
        if kernel.planned:
            sys.stdout.write(f"  {kernel.planned}\n")
    for ignored in packed.ignored_folders:
        sys.stdout.write(f"left out: {ignored}\n")
    sys.stdout.write(f"package  {packed.project}\nwheel    {packed.wheel}\nsigner   {packed.signer}\n")
    sys.stdout.write(f"native   {packed.native}\n")
    sys.stdout.write(f"use      pip install {packed.wheel}; OPFORGE_BACKEND={name} python your_script.py\n")
    return 0
