"""`opforge build`: C++ and CUDA libraries of operators, each with a Python package."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError

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
    if not 1 <= workers <= 256:
        raise OpforgeError(f"--workers {workers} is out of range; it must be 1 to 256")
    if timeout < 1:
        raise OpforgeError(f"--timeout {timeout} is too small; it must be at least 1")
    from opforge.package.build import BuildOptions, build_folder

    wishes = BuildOptions(out, namespace, tuple(flag or ()), target, workers, timeout)
    with ProgressLine() as progress:
        libraries = build_folder(directory, wishes, progress)
    place = out or directory / "build"
    if format_ == "json":
        sys.stdout.write(
            json.dumps({"out": str(place), "libraries": [one.as_json() for one in libraries]}, indent=2) + "\n"
        )
    else:
        _show(libraries, place)
    return 1 if any(one.status == "failed" for one in libraries) else 0


def _show(libraries: list[LibraryResult], place: Path) -> None:
    for one in libraries:
        if one.status == "failed":
            sys.stdout.write(f"{one.name}  failed: {one.error}\n")
            continue
        how = "cached" if one.status == "cached" else f"built in {one.seconds:.1f} s"
        sys.stdout.write(f"{one.name}  {place / one.name}, {one.abi} ABI, {how}\n")
        for schema in (one.operators or {}).values():
            sys.stdout.write(f"  torch.ops.{schema.replace('::', '.', 1)}\n")
    counts = Counter(one.status for one in libraries)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("built", "cached", "failed") if counts[status])
    usable = next((one.name for one in libraries if one.status != "failed"), None)
    hint = f"; with {place} on the path, `import {usable}`" if usable else ""
    sys.stdout.write(f"libraries: {summary}{hint}\n")
