"""`opforge build`: C++ and CUDA libraries of operators, each with a Python package."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import MAX_TIMEOUT_S, OpforgeError, check_range

if TYPE_CHECKING:
    from opforge.package.build import LibraryResult


def register(app: typer.Typer) -> None:
    app.command("build")(build)


def build(
    directory: Annotated[Path, typer.Argument(help="A folder of sources, or a folder with one subfolder per library.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the packages (default: DIRECTORY/build).")] = None,
    namespace: Annotated[
        str, typer.Option(help="Value of OPFORGE_NAMESPACE in the sources (default: the folder's name).")
    ] = "",
    flag: Annotated[
        list[str] | None, typer.Option(help="A flag for the compiler, such as --flag=-mavx2. May be repeated.")
    ] = None,
    target: Annotated[str, typer.Option(help="Oldest torch that a library of the stable ABI must support.")] = "2.11",
    workers: Annotated[int, typer.Option(help="Number of libraries to build at once.")] = 2,
    timeout: Annotated[float, typer.Option(help="Time limit of one compiler, in seconds.")] = 600.0,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Build each folder of C++ or CUDA sources into a library of operators with a Python package that loads it."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    check_range("--workers", workers, 1, 256)
    check_range("--timeout", timeout, 1, MAX_TIMEOUT_S)
    from opforge.package.build import BuildOptions, build_folder

    options = BuildOptions(out, namespace, tuple(flag or ()), target, workers, timeout)
    with ProgressLine() as progress:
        libraries = build_folder(directory, options, progress)
    place = out or directory / "build"
    if format_ == "json":
        sys.stdout.write(
            json.dumps({"out": str(place), "libraries": [library.as_json() for library in libraries]}, indent=2) + "\n"
        )
    else:
        _show(libraries, place)
    return 1 if any(library.status == "failed" for library in libraries) else 0


def _show(libraries: list[LibraryResult], place: Path) -> None:
    for library in libraries:
        if library.status == "failed":
            sys.stdout.write(f"{library.name}  failed: {library.error}\n")
            continue
        how = "cached" if library.status == "cached" else f"built in {library.seconds:.1f} s"
        sys.stdout.write(f"{library.name}  {place / library.name}, {library.abi} ABI, {how}\n")
        for schema in (library.operators or {}).values():
            sys.stdout.write(f"  torch.ops.{schema.replace('::', '.', 1)}\n")
    counts = Counter(library.status for library in libraries)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("built", "cached", "failed") if counts[status])
    usable = next((library.name for library in libraries if library.status != "failed"), None)
    hint = f"; with {place} on the path, `import {usable}`" if usable else ""
    sys.stdout.write(f"libraries: {summary}{hint}\n")
