"""`opforge model`: run a whole model with a backend's kernels, and find the kernels that make it wrong."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from opforge.cases.values import parse_dtype
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
            help="A Python file that defines model() and inputs(), and optionally loss(output) and "
            "optimizer(parameters); "
            "module:function, which returns the model and its inputs; hf:CLASS (of transformers), timm:NAME or "
            "torchvision:NAME.",
        ),
    ],
    backend: Annotated[str, typer.Option(help="Source of the kernels: see `opforge ls backends`.")] = "directory",
    ops_directory: Annotated[
        str, typer.Option(help="Folder of kernels for backend `directory`.")
    ] = "generated_kernels",
    ops: Annotated[str | None, typer.Option(help="Only kernels of these operators, for example 'mm,gelu'.")] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="FOLDER=NAME: implementation to use instead of the newest. May be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of weights and inputs: f32, f16, bf16 or f64 (default: the model's).")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Run forward, backward and an optimizer step, not only forward.")
    ] = False,
    batch: Annotated[int, typer.Option(help="For an architecture by name: batch size.")] = 1,
    seq: Annotated[int, typer.Option(help="For an architecture by name: tokens per input.")] = 128,
    image: Annotated[int | None, typer.Option(help="For an architecture by name: image size in pixels.")] = None,
    layers: Annotated[int | None, typer.Option(help="For an architecture by name: maximum number of layers.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE in an architecture's configuration. May be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and random numbers of a run.")] = 0,
    timeout: Annotated[float, typer.Option(help="Time limit of one run of the model, in seconds.")] = 300.0,
    memory_gib: Annotated[float, typer.Option(help="Memory limit of the model's process (CPU).")] = 8.0,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Allow a kernel to call the operator that it replaces.")
    ] = False,
    no_confine: Annotated[
        bool, typer.Option("--no-confine", help="Give model and kernels your access to files, network and processes.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> int:
    """Run a model with kernels instead of ATen's: are its results right, which kernels ran, which cause an error."""
    if format_ not in ("text", "json"):
        raise OpforgeError(f"unknown format {format_!r}; allowed: text, json")
    if not 0 <= seed < 1 << 62:
        raise OpforgeError(f"--seed {seed} is out of range; it must be 0 to {(1 << 62) - 1}")
    from opforge.cli.run import parse_implementations, parse_names, warn_about_confinement
    from opforge.models.judge import ModelConfig, judge_model
    from opforge.traces.targets import Settings, parse_changes

    settings = Settings(batch=batch, seq=seq, image=image, layers=layers, changes=parse_changes(set_ or []))
    config = RunConfig(
        suite="model",
        backend=backend,
        ops=parse_names("--ops", ops),
        device=device,
        ops_directory=ops_directory,
        implementations=parse_implementations(implementation or []),
        timeout_s=timeout,
        memory_gib=memory_gib,
        allow_fallback=allow_fallback,
        confine=not no_confine,
    )
    with ProgressLine() as progress:
        asked = ModelConfig(target, config, _dtype(dtype), train, seed, settings)
        report = judge_model(asked, lambda label: progress(label, 0, 1))
    warn_about_confinement(config, report["confinement"])
    _show(report, as_json=format_ == "json")
    return _exit_code(report)


def _dtype(name: str | None) -> str:
    if name is None:
        return ""
    short = parse_dtype(name)
    if short not in _DTYPES:
        raise OpforgeError(f"--dtype {name} is not supported for a model's weights; allowed: {', '.join(_DTYPES)}")
    return short


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    from opforge.reports.model import print_model_report
    from opforge.reports.terminal import console_for_results

    print_model_report(console_for_results(), report)


def _exit_code(report: dict[str, Any]) -> int:
    if report["verdict"] != "passed" or any("verdict" in kernel for kernel in report["kernels"]):
        return 1
    if not any(kernel["calls"] for kernel in report["kernels"]):
        sys.stderr.write("opforge: this model called no kernel, so nothing was judged\n")
        return NothingToJudgeError.exit_code
    return 0
