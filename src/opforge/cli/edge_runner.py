"""`opforge edge runner`: a program for the device, without Python and torch, with the kernels that a model needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.errors import OpforgeError

if TYPE_CHECKING:
    from opforge.edge.build import OperatorFolder
    from opforge.edge.runner import BuiltRunner, RunnerOptions


def register(app: typer.Typer) -> None:
    app.command("runner")(runner)


def runner(
    directory: Annotated[
        Path, typer.Argument(help="A folder with ops.yaml and kernels/, as `opforge edge init` makes.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The runner to write.")] = Path("runner"),
    model: Annotated[
        Path | None,
        typer.Option(help="A .pte: include only the kernels it needs, and link the libraries it needs."),
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Only these operators, for example 'mul3,my_ops::add3'.")] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Copy ExecuTorch's libraries beside the runner and load them from there.")
    ] = False,
    aten: Annotated[bool, typer.Option("--aten", help="Link ExecuTorch's kernels for ATen operators.")] = False,
    xnnpack: Annotated[bool, typer.Option("--xnnpack", help="Link the XNNPACK backend.")] = False,
    toolchain: Annotated[
        Path | None, typer.Option(help="A toolchain file of CMake's: compile for another machine, with cmake.")
    ] = None,
    executorch: Annotated[
        Path | None, typer.Option(help="The other machine's ExecuTorch package, unpacked (with --toolchain).")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also print its size with all operators of the folder.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Build a program that runs a .pte without Python and torch: `runner MODEL.pte INPUT.npy … -o FOLDER`."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.cli.edge import build_options, select_operators
    from opforge.edge import runner as edge_runner
    from opforge.edge.build import read_folder
    from opforge.kernels.native.compiler import COMPILE_LIMIT_S

    folder = read_folder(directory)
    chosen = select_operators(folder, ops, model)
    needed = set(edge_runner.needed_libraries(model)) if model is not None else set()
    needed |= {edge_runner.ATEN_LIBRARY} if aten else set()
    needed |= {edge_runner.XNNPACK_LIBRARY} if xnnpack else set()
    options = edge_runner.RunnerOptions(
        tuple(sorted(needed)), beside, build_options("direct", COMPILE_LIMIT_S, toolchain, executorch)
    )
    built = edge_runner.build_runner(folder, chosen, out, options)
    full_build = _build_with_all_operators(folder, options) if compare else None
    if format_ == "json":
        row = {
            **built.as_json(),
            "all_bytes": full_build.bytes if full_build else None,
            "all_loaded_bytes": full_build.loaded_bytes if full_build else None,
        }
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
    else:
        _show(built, full_build, out, folder, beside)
    return 0


def _build_with_all_operators(folder: OperatorFolder, options: RunnerOptions) -> BuiltRunner:
    """Return what a runner with all operators would be; it is not kept."""
    import tempfile
    from dataclasses import replace

    from opforge.edge.bindings import select_all
    from opforge.edge.runner import build_runner

    with tempfile.TemporaryDirectory(prefix="opforge-runner-") as place:
        return build_runner(
            folder, select_all(folder.entries), Path(place) / "runner", replace(options, copy_libraries=False)
        )


def _show(built: BuiltRunner, full_build: BuiltRunner | None, out: Path, folder: OperatorFolder, beside: bool) -> None:
    how = "cached" if built.cached else f"built in {built.seconds:.1f} s"
    left_out = [entry.name for entry in folder.entries if entry.name not in built.operators]
    place = "beside it" if beside else "of the installed package"
    lines = [
        f"{out}  {_size(built)}, {how}",
        f"  kernels    {', '.join(built.operators)} ({built.origin})",
        *([f"  left out   {', '.join(left_out)}"] if left_out else []),
        f"  libraries  {', '.join(built.libraries)}: {built.library_bytes:,} bytes, {place}",
        *([f"  with all {len(folder.entries)} operators it has {_size(full_build)}"] if full_build else []),
        f"run it: {out} MODEL.pte INPUT.npy … -o FOLDER",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _size(built: BuiltRunner) -> str:
    return f"{built.bytes:,} bytes ({built.loaded_bytes:,} of code and data)"
