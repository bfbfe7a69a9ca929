"""`opforge strength`: test a suite with mutants of ATen before it tests kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.cases.values import parse_dtype
from opforge.cli.progress import ProgressLine
from opforge.errors import OpforgeError
from opforge.runs.config import RunConfig
from opforge.suites.lookup import find_suite, names_a_file


def register(app: typer.Typer) -> None:
    app.command("strength")(strength)


def strength(
    suite: Annotated[str, typer.Option(help="The suite to test: see `opforge ls suites`.")] = "opinfo",
    ops: Annotated[
        str | None, typer.Option(help="Only these operators, for example 'add,sub' or 'add.Tensor'.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Dtypes of the suite's samples.")] = "f32,bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Number of mutants to judge at once.")] = 2,
    timeout: Annotated[float, typer.Option(help="Time limit of one case, in seconds.")] = 60.0,
    least: Annotated[float, typer.Option(help="Minimum share of killed mutants for exit code 0.")] = 0.99,
    save: Annotated[
        Path | None, typer.Option(help="Also write the table that `opforge run` reads to this file.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Run mutants of ATen against a suite: which mutants it rejects, and which operators have weak cases."""
    for name, value in (("--ops", ops), ("--dtypes", dtypes)):
        if value is not None and not value.replace(",", "").strip():
            raise OpforgeError(f"{name} is empty; leave it out to take all")
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    if not 0 <= least <= 1:
        raise OpforgeError(f"--least {least} is out of range; it must be 0 to 1")
    find_suite(suite)  # a misspelt name is answered before anything is imported
    config = RunConfig(
        suite=suite,
        backend="aten",
        ops=tuple(filter(None, (o.strip() for o in (ops or "").split(",")))),
        device=device,
        dtypes=tuple(dict.fromkeys(parse_dtype(d) for d in dtypes.split(",") if d.strip())),
        timeout_s=timeout,
        workers=workers,
    )
    return _measure(config, save, least, as_json=format_ == "json")


def _measure(config: RunConfig, save: Path | None, least: float, *, as_json: bool) -> int:
    from opforge.cache import write_atomically
    from opforge.runs.strength import measure_strength
    from opforge.suites.strength import measurement_file

    with ProgressLine() as progress:
        measured = measure_strength(config, progress=progress)
    row = measured.as_json()
    kept = (
        None
        if config.ops or names_a_file(config.suite)
        else measurement_file(config.suite, config.device, config.dtypes)
    )
    if kept is not None:
        write_atomically(kept, json.dumps(row))
    if save is not None:
        write_atomically(save, json.dumps(measured.as_table(), indent=1) + "\n")
    if as_json:
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
    else:
        from opforge.reports.strength import print_strength
        from opforge.reports.terminal import console_for_results

        console = console_for_results()
        print_strength(console, measured)
        for path in filter(None, (kept, save)):
            console.print(f"kept         {path}", soft_wrap=True)
    return 0 if measured.kill_rate >= least else 1
