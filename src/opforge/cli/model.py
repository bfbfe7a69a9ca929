"""`opforge model`: run a whole model with a backend's kernels, and say whether it is still right, and who is to blame if not."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from opforge.cases.values import dtype_from_user
from opforge.cli.progress import ProgressLine
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.runs.config import RunConfig

_DTYPES = ("f32", "f16", "bf16", "f64")


def register(app: typer.Typer) -> None:
    app.command("model")(model)


def model(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Python file that defines model() and inputs(), and loss(output) and optimizer(parameters) if you like; "
            "module:function, which returns the model and its inputs; hf:CLASS (of transformers), timm:NAME or torchvision:NAME.",
        ),
    ],
    backend: Annotated[str, typer.Option(help="Where kernels come from: see `opforge ls backends`.")] = "directory",
    ops_directory: Annotated[
        str, typer.Option(help="The folder of kernels of backend `directory`.")
    ] = "generated_kernels",
    ops: Annotated[str | None, typer.Option(help="Only kernels of these operators, for example 'mm,gelu'.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="FOLDER=NAME: not the newest one. May be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="f32, f16, bf16 or f64, of weights and inputs; the model's own unless given.")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Forward, backward and an optimizer's step, not forward alone.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Of an architecture by name: how many inputs.")] = 1,
    seq: Annotated[int, typer.Option(help="Of an architecture by name: tokens of an input.")] = 128,
    image: Annotated[int | None, typer.Option(help="Of an architecture by name: pixels of a side.")] = None,
    layers: Annotated[int | None, typer.Option(help="Of an architecture by name: no more layers than this.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE in an architecture's configuration. May be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, inputs, and what is drawn in a run.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one run of the model may take.")] = 300.0,
    memory_gib: Annotated[float, typer.Option(help="Memory that a model's process may take (CPU).")] = 8.0,
    no_confine: Annotated[
        bool, typer.Option("--no-confine", help="Let model and kernels reach files, network and processes as you do.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Run a model with kernels in ATen's place: are outputs, loss and gradients still right, which kernels were hit, who is to blame."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    if not 0 <= seed < 1 << 62:
        raise OpforgeError(f"--seed {seed} is out of range; it must be 0 to {(1 << 62) - 1}")
    from opforge.cli.run import chosen_implementations, names_in, say_what_is_missing
    from opforge.models.conduct import ModelConfig, judge_model
    from opforge.traces.targets import Settings, parse_changes

    settings = Settings(batch=batch, seq=seq, image=image, layers=layers, changes=parse_changes(set_ or []))
    config = RunConfig(
        suite="model",
        backend=backend,
        ops=names_in("--ops", ops),
        device=device,
        ops_directory=ops_directory,
        implementations=chosen_implementations(implementation or []),
        timeout_s=timeout,
        memory_gib=memory_gib,
        confine=not no_confine,
    )
    with ProgressLine() as progress:
        asked = ModelConfig(target, config, _dtype(dtype), train, seed, settings)
        report = judge_model(asked, lambda what: progress(what, 0, 1))
    say_what_is_missing({"config": {"confine": config.confine}, "confinement": report["confinement"]})
    _show(report, as_json=format_ == "json")
    return _exit_code(report)


def _dtype(name: str | None) -> str:
    if name is None:
        return ""
    short = dtype_from_user(name)
    if short not in _DTYPES:
        raise OpforgeError(
            f"--dtype {name} is not one that a model's weights are run in; allowed: {', '.join(_DTYPES)}"
        )
    return short


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    from opforge.reports.model import show
    from opforge.reports.terminal import console_for_results

    show(console_for_results(), report)


def _exit_code(report: dict[str, Any]) -> int:
    if report["verdict"] != "passed" or any("verdict" in kernel for kernel in report["kernels"]):
        return 1
    if not any(kernel["calls"] for kernel in report["kernels"]):
        sys.stderr.write("opforge: no kernel answered a call of this model, so nothing was judged\n")
        return NothingToJudgeError.exit_code
    return 0
