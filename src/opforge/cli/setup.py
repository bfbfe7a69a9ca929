"""`opforge setup`: folders with a template for each operator of a suite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opforge.cases.values import parse_dtype
from opforge.cli.progress import ProgressLine
from opforge.errors import NothingToJudgeError
from opforge.suites.base import DEFAULT_DTYPES, SuiteOptions
from opforge.suites.lookup import find_suite


def register(app: typer.Typer) -> None:
    app.command("setup")(setup)


def setup(
    suite: Annotated[str, typer.Option(help="Suite whose operators to set up.")] = "smoke",
    ops: Annotated[str, typer.Option(help="Only these operators.")] = "",
    ops_directory: Annotated[Path, typer.Option(help="Parent folder of the operators' folders.")] = Path(
        "generated_kernels"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Dtypes of the suite's cases.")] = ",".join(DEFAULT_DTYPES),
) -> int:
    """Make a folder with a kernel template for each operator; existing kernels are kept."""
    from opforge.backends.scaffold import scaffold
    from opforge.ops import table

    wanted = frozenset(op.name for op in table().select(ops.split(","))) if ops else None
    options = SuiteOptions(device, tuple(parse_dtype(d) for d in dtypes.split(",")), wanted)
    with ProgressLine() as progress:
        loaded = find_suite(suite).load(options, progress)
    if not loaded.cases:
        raise NothingToJudgeError(
            f"suite {suite!r} has no cases for {ops or 'anything'}; see `opforge ls suites` for others"
        )
    made, kept = scaffold(ops_directory, loaded.cases)
    for path in made:
        sys.stdout.write(f"made {path}\n")
    sys.stdout.write(f"{len(made)} kernels to fill in under {ops_directory}, {len(kept)} left as they were\n")
    return 0
