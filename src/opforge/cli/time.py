"""`opforge time`: time one kernel against ATen on given cases."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError
from opforge.runs.config import DEFAULT_RACE_S, RunConfig

if TYPE_CHECKING:
    from opforge.backends.single import SingleBackend
    from opforge.cases import Case
    from opforge.runs.rows import ResultRow

RaceSeconds = Annotated[
    float,
    typer.Option(
        envvar="OPFORGE_RACE_SECONDS",
        help="Seconds of each race between kernel and ATen. More make narrower intervals. With fewer than "
        f"{DEFAULT_RACE_S:g}, proofs get no speeds.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("time")(time)


def time(
    kernel: Annotated[str, typer.Argument(help="A kernel's file, a folder with one, or aten:OP for ATen itself.")],
    case: Annotated[
        list[str] | None,
        typer.Option(help="A call such as '((T([1024, 1024], f32),), {})'. May be repeated."),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(help="The overload or variant (in-place, out), if it is not the one in the kernel's name."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Time limit of one case, in seconds.")] = 60.0,
    race_seconds: RaceSeconds = DEFAULT_RACE_S,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Allow the kernel to call the operator that it replaces.")
    ] = False,
    no_confine: Annotated[
        bool, typer.Option("--no-confine", help="Give the kernel your access to files, network and processes.")
    ] = False,
    runtime: Annotated[
        str,
        typer.Option(
            help="How the kernel is called: python (its function) or native (the operator, at which it is "
            "installed as by `opforge.enable`)."
        ),
    ] = "python",
    out: Annotated[Path | None, typer.Option(help="Keep the run in this new folder.")] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Time one kernel against ATen on given cases. It is judged first; wrong kernels are not timed."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    from opforge.backends.single import SingleBackend
    from opforge.suites.given import performance_case

    backend = SingleBackend.from_argument(kernel, op)
    if not case:
        raise OpforgeError("no case to time; give one or more with --case, for example '((T([1024, 1024], f32),), {})'")
    cases = [performance_case(backend.op, text) for text in case]
    config = RunConfig(
        suite="given",
        backend=backend.name,
        device=device,
        timeout_s=timeout,
        race_s=race_seconds,
        workers=1,
        allow_fallback=allow_fallback,
        confine=not no_confine,
        runtime=runtime,
    )
    if out is not None:
        return _time_kernel(config, backend, cases, out, as_json=format_ == "json")
    with tempfile.TemporaryDirectory(prefix="opforge-time-") as folder:
        return _time_kernel(config, backend, cases, Path(folder), as_json=format_ == "json")


def _time_kernel(config: RunConfig, backend: SingleBackend, cases: list[Case], folder: Path, *, as_json: bool) -> int:
    from opforge.cli.run import warn_about_confinement
    from opforge.reports.run_files import write_reports
    from opforge.runs import run
    from opforge.suites.given import GivenSuite

    with ProgressLine() as progress:
        result = run(config, folder, progress=progress, suite=GivenSuite(cases), backend=backend)
    warn_about_confinement(config, result.manifest.confinement)
    write_reports(folder, result.summary)
    order = {case.id: number for number, case in enumerate(cases)}
    rows = sorted(result.store.rows(), key=lambda row: order[row.id])
    _show(config, backend, rows, as_json=as_json)
    return 0 if rows and all(row.verdict == "passed" and row.headline is not None for row in rows) else 1


def _show(config: RunConfig, backend: SingleBackend, rows: list[ResultRow], *, as_json: bool) -> None:
    if as_json:
        head = {"op": backend.op, "kernel": backend.kernel.name, "file": backend.kernel.file, "device": config.device}
        sys.stdout.write(json.dumps({**head, "cases": [row.wire() for row in rows]}, indent=2) + "\n")
        return
    from opforge.reports.kernel_times import print_kernel_times
    from opforge.reports.terminal import console_for_results

    console = console_for_results()
    console.print(f"{backend.kernel.name} against ATen: {backend.op} on {config.device}", soft_wrap=True)
    print_kernel_times(console, rows)
