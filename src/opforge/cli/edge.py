"""`opforge edge`: custom operators on the ExecuTorch runtime: make, export, build, run, check."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge.cli import edge_runner, edge_take
from opforge.cli.progress import ProgressLine
from opforge.errors import MAX_TIMEOUT_S, MIN_TIMEOUT_S, OpforgeError, check_range

if TYPE_CHECKING:
    from opforge.edge.bindings import Selection
    from opforge.edge.build import EdgeLibrary, OperatorFolder
    from opforge.edge.check import CheckRow, EdgeCheckReport
    from opforge.edge.run import ProgramOutput
    from opforge.edge.toolchain import BuildOptions

_FORMAT = typer.Option("--format", help="text or json.")
_WITH = typer.Option("--with", help="Build tool: direct (calls the compiler) or cmake.")
_TOOLCHAIN = typer.Option(help="A toolchain file of CMake's: compile for another machine, with cmake.")
_EXECUTORCH = typer.Option(help="The other machine's ExecuTorch package, unpacked (with --toolchain).")
edge = typer.Typer(
    name="edge",
    help="Custom operators on the ExecuTorch runtime: make, export, build, run, check.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def register(app: typer.Typer) -> None:
    edge_runner.register(edge)
    edge_take.register(edge)
    app.add_typer(edge)


@edge.command("init")
def init(
    directory: Annotated[Path, typer.Argument(help="The folder to make.")],
    namespace: Annotated[str, typer.Option(help="Namespace of the operators.")] = "my_ops",
    op: Annotated[list[str] | None, typer.Option(help="Name of an operator. May be repeated (default: mul3).")] = None,
) -> int:
    """Make an operator folder: registration in Python, C++ kernels, their bindings, a model that uses them, tests."""
    from opforge.edge.init import make_folder

    files = make_folder(directory, namespace, op or ["mul3"])
    sys.stdout.write(f"made {directory}, {len(files)} files:\n" + "".join(f"  {file}\n" for file in files))
    sys.stdout.write(f"next: opforge edge check {directory}\n")
    return 0


@edge.command("export")
def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py with model() and inputs(), FILE.py:NAME for another function or class of it, "
            "or module:function.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("model.pte"),
    dynamic: Annotated[
        list[str] | None, typer.Option(help="INPUT.DIM=LOW..HIGH: a dimension that may vary. May be repeated.")
    ] = None,
    xnnpack: Annotated[bool, typer.Option("--xnnpack", help="Delegate supported operators to XNNPACK.")] = False,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds.")] = 600.0,
    format_: Annotated[str, _FORMAT] = "text",
) -> int:
    """Export a model to an ExecuTorch program, in its own process."""
    _check_format(format_)
    check_range("--timeout", timeout, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
    from opforge.edge.export import export_model, parse_dynamic, parse_target

    target, ranges = parse_target(model), parse_dynamic(dynamic or [])
    with ProgressLine() as progress:
        progress(f"exporting {model}", 0, 1)
        exported = export_model(target, out, dynamic=ranges, xnnpack=xnnpack, limit_s=timeout)
    if format_ == "json":
        return _print_json({**asdict(exported), "path": str(exported.path), "custom": exported.custom})
    sys.stdout.write(f"wrote {exported.path}, {exported.bytes} bytes, in {exported.seconds:.1f} s\n")
    sys.stdout.write(f"inputs     {exported.inputs}\n")
    sys.stdout.write(f"operators  {', '.join(exported.operators) or 'none'}\n")
    if exported.delegated:
        sys.stdout.write(f"delegated  {exported.delegated} parts to XNNPACK\n")
    for name in exported.taken_apart:
        sys.stdout.write(
            f"note       {name} was decomposed because it is CompositeImplicitAutograd: a kernel for it would not run\n"
        )
    if exported.custom:
        sys.stdout.write(
            f"needs      kernels of {', '.join(exported.custom)}: opforge edge build DIR --model {exported.path}\n"
        )
    return 0


@edge.command("build")
def build(
    directory: Annotated[Path, typer.Argument(help="An operator folder: ops.yaml, kernels/ and optionally ops.py.")],
    ops: Annotated[str | None, typer.Option(help="Only these operators, for example 'mul3,my_ops::add3'.")] = None,
    model: Annotated[Path | None, typer.Option(help="Only the operators that this .pte needs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the library (default: DIRECTORY/build).")] = None,
    with_: Annotated[str, _WITH] = "direct",
    toolchain: Annotated[Path | None, _TOOLCHAIN] = None,
    executorch: Annotated[Path | None, _EXECUTORCH] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of one compiler, in seconds.")] = 600.0,
    format_: Annotated[str, _FORMAT] = "text",
) -> int:
    """Build a library of an operator folder's kernels: all, those given by name, or those that a model needs."""
    _check_format(format_)
    check_range("--timeout", timeout, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
    from opforge.edge.build import build as build_library
    from opforge.edge.build import check_registration, read_folder

    _check_tool(with_)
    options = build_options(with_, timeout, toolchain, executorch)
    folder = read_folder(directory)
    selection = select_operators(folder, ops, model)
    with ProgressLine() as progress:
        progress("schemas", 0, 2)
        check_registration(folder)
        progress("building", 1, 2)
        built = build_library(folder, selection, out, options)
    if format_ == "json":
        return _print_json({**asdict(built), "library": str(built.library)})
    _show_built(built)
    return 0


def build_options(tool: str, limit_s: float, toolchain: Path | None, executorch: Path | None) -> BuildOptions:
    """Return the options of a build; a toolchain file needs CMake."""
    from opforge.edge.toolchain import BuildOptions, read_target

    if toolchain is None:
        if executorch is not None:
            raise OpforgeError(f"--executorch {executorch} needs --toolchain FILE, which says for which machine")
        return BuildOptions(tool, limit_s)
    return BuildOptions("cmake", limit_s, read_target(toolchain, executorch))


def select_operators(folder: OperatorFolder, ops: str | None, model: Path | None) -> Selection:
    from opforge.edge.bindings import select_all, select_for_model, select_names

    if ops is not None and model is not None:
        raise OpforgeError("--ops and --model cannot be combined; give one of them")
    if model is not None:
        return select_for_model(folder.entries, model)
    if ops is None:
        return select_all(folder.entries)
    words = [word.strip() for word in ops.split(",") if word.strip()]
    if not words:
        raise OpforgeError("--ops is empty; leave it out to take all")
    return select_names(folder.entries, words)


def _show_built(built: EdgeLibrary) -> None:
    how = "cached" if built.cached else f"built in {sum(built.seconds.values()):.1f} s"
    other = f" for {built.machine}" if built.machine != platform.machine() else ""
    size = f"{built.bytes} bytes ({built.loaded_bytes} of code and data)"
    sys.stdout.write(f"{built.library}  {size}, {built.tool}{other}, {how}\n")
    sys.stdout.write(f"registers  {', '.join(built.operators)} ({built.selection})\n")
    if built.left_out:
        sys.stdout.write(f"left out   {', '.join(built.left_out)}\n")


@edge.command("run")
def run(
    program: Annotated[Path, typer.Argument(metavar="MODEL.pte", help="The program to run.")],
    inputs: Annotated[
        str,
        typer.Option(
            help="Shapes and dtypes such as 'T([2, 3], f32)', or a .safetensors file with tensors 0, 1, … "
            "(default: as in the program)."
        ),
    ] = "",
    library: Annotated[list[Path] | None, typer.Option(help="A library of kernels; may be repeated.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the results to this .safetensors file.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs given by shape.")] = 0,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds.")] = 60.0,
    format_: Annotated[str, _FORMAT] = "text",
) -> int:
    """Run a program on the ExecuTorch runtime, in its own process; show its results and the kernels that ran."""
    _check_format(format_)
    check_range("--timeout", timeout, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
    from opforge.edge.run import ProgramJob, run_program

    file = Path(inputs) if inputs.endswith(".safetensors") else None
    job = ProgramJob(program, tuple(library or ()), "" if file else inputs, file, seed=seed, out=out, limit_s=timeout)
    with ProgressLine() as progress:
        progress(f"running {program}", 0, 1)
        ran = run_program(job)
    if format_ == "json":
        row = {
            "program": str(program),
            "inputs": ran.inputs,
            "results": [result.as_json() for result in ran.results],
            "kernels": ran.kernels,
            "seconds": ran.seconds,
        }
        return _print_json(row)
    sys.stdout.write(f"inputs   {ran.inputs}\n")
    for number, result in enumerate(ran.results):
        sys.stdout.write(f"result {number} {_result(result)}\n")
    sys.stdout.write(f"kernels  {_kernels(ran.kernels) or 'none'}\n")
    return 0


def _result(result: ProgramOutput) -> str:
    if not result.type:
        return repr(result.value)
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in result.first)
    more = ", …" if math.prod(result.shape) > len(result.first) else ""
    return f"T({list(result.shape)}, {result.dtype})  {shown}{more}"


def _kernels(kernels: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}×" for name, count in kernels.items())


@edge.command("check")
def check(
    directory: Annotated[Path, typer.Argument(help="An operator folder with a model.py.")],
    with_: Annotated[str, _WITH] = "direct",
    format_: Annotated[str, _FORMAT] = "text",
) -> int:
    """Export, build and run a folder's operators; exit with 1 if a result differs or a kernel did not run."""
    _check_format(format_)
    _check_tool(with_)
    from opforge.edge.check import check as check_folder

    with ProgressLine() as progress:
        report = check_folder(directory, tool=with_, progress=progress)
    if format_ == "json":
        _print_json(report.as_json())
    else:
        sys.stdout.write("\n".join(_lines(report)) + "\n")
    return report.exit_code


def _lines(report: EdgeCheckReport) -> list[str]:
    about = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines = [f"{report.folder} ({about})", f"operators  {', '.join(report.operators)}"]
    lines += (
        [f"unused     {', '.join(report.unused)}: model.py does not use it, so it was not checked"]
        if report.unused
        else []
    )
    lines.append(f"library    {report.library_bytes} bytes, {report.tool}")
    width = max(len(row.case) for row in report.rows)
    shown: set[str] = set()
    for row in report.rows:
        lines += _row_lines(row, width, row.reason in shown)
        shown.add(row.reason)
    counts = report.counts()
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    lines.append("seconds    " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.seconds.items()))
    return lines


def _row_lines(row: CheckRow, width: int, known: bool) -> list[str]:
    """Return the lines of a row; a known reason is not repeated."""
    if row.kind.startswith("without"):
        note = "missing, as expected" if row.verdict == "passed" else ""
        lines = [f"{row.kind}  {row.verdict}  {note}".rstrip()]
    else:
        figures = "" if row.difference is None else f"difference {row.difference:g}, {_kernels(row.kernels)}"
        lines = [f"{row.case:{width}}  {row.kind:7}  {row.verdict:7}  {figures}".rstrip()]
    if known and row.reason:
        return [f"{lines[0]}  as above"]
    return [*lines, *([f"  {row.reason}"] if row.reason else [])]


def _check_format(name: str) -> None:
    if name not in ("text", "json"):
        raise OpforgeError(f"unknown format {name!r}; allowed: text, json")


def _check_tool(name: str) -> None:
    if name not in ("direct", "cmake"):
        raise OpforgeError(f"--with {name!r} is unknown; allowed: direct, cmake")


def _print_json(value: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    return 0
