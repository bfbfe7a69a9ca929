"""`opforge run`: judge a backend on a suite."""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opforge import registry
from opforge.cases.values import parse_dtype
from opforge.cli import generation
from opforge.cli.progress import ProgressLine
from opforge.cli.termination import SIGTERM_EXIT_CODE, Terminated, raise_on_sigterm
from opforge.cli.time import RaceSeconds
from opforge.errors import DiskFullError, OpforgeError, is_disk_full
from opforge.runs.config import DEFAULT_RACE_S, RunConfig
from opforge.suites.base import DEFAULT_DTYPES
from opforge.suites.lookup import find_suite, short_name

if TYPE_CHECKING:  # it needs what a run needs, and --help does not
    from opforge.runs.pipeline import RunResult

_OPTIONS_WITH_RESUME = {"resume", "workers", "executor", "ray_address", "format_", *generation.BUDGET_OPTIONS}


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    context: typer.Context,
    suite: Annotated[
        str, typer.Option(help="Source of the cases: see `opforge ls suites`; or a file of recorded calls.")
    ] = "smoke",
    backend: Annotated[str, typer.Option(help="Source of the kernels: see `opforge ls backends`.")] = "aten",
    ops: Annotated[
        str | None, typer.Option(help="Only these operators, for example 'add,sub' or 'add.Tensor'.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtypes: Annotated[
        str, typer.Option(help="Dtypes of OpInfo's samples; operators inside them may use others.")
    ] = ",".join(DEFAULT_DTYPES),
    ops_directory: Annotated[
        str | None,
        typer.Option(
            help="Folder of kernels (default: generated_kernels), or for right kernels by language models (default: "
            "OUT/generated_kernels)."
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="FOLDER=NAME: implementation to use instead of the newest. May be repeated."),
    ] = None,
    custom_ops_root: Annotated[
        str, typer.Option(help="Folder of your own operators, for suite and backend `custom_ops`.")
    ] = "custom_ops",
    p: Annotated[float, typer.Option(help="The speedup that counts for perf@p.")] = 1.0,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of kernels to judge at once (default: 2; with Ray, as many as fit)."),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Where kernels are judged: local or ray; see `opforge ls executors`.")
    ] = "local",
    ray_address: Annotated[
        str,
        typer.Option(help="With ray, the cluster: auto or HOST:PORT (default: start Ray on this machine)."),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Time limit of one case, in seconds.")] = 60.0,
    race_seconds: RaceSeconds = DEFAULT_RACE_S,
    memory_gib: Annotated[float, typer.Option(help="Memory limit of a kernel's process (CPU).")] = 8.0,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Allow a kernel to call the operator that it replaces.")
    ] = False,
    no_confine: Annotated[
        bool, typer.Option("--no-confine", help="Give kernels your access to files, network and processes.")
    ] = False,
    runtime: Annotated[
        str,
        typer.Option(
            help="How kernels are called: python (each kernel's function) or native (the operator, at which the "
            "kernel is installed as by `opforge.enable`)."
        ),
    ] = "python",
    topn: Annotated[
        int | None, typer.Option(help="Of recorded calls: the N per operator with the most bytes times count.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Of recorded calls: a fixed random sample of N, weighted by bytes times count.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Of recorded calls: small (32 MiB, 2 GFLOP) or full (default: small on a CPU, else full)."),
    ] = None,
    max_mib: Annotated[float | None, typer.Option(help="Of recorded calls: leave out larger ones.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results (default: opforge-runs/TIME-SUITE-BACKEND).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue an interrupted run.")] = None,
    format_: Annotated[
        str,
        typer.Option("--format", help="Output on stdout: text, json, junit or github (annotations, step summary)."),
    ] = "text",
    llm_model: generation.Model = None,
    llm_attempts: generation.Attempts = 5,
    llm_relay_url: generation.RelayUrl = "",
    kernel_agent_workers: generation.AgentWorkers = 4,
    kernel_agent_max_rounds: generation.AgentRounds = 10,
    kernel_agent_target: generation.AgentTarget = 1.0,
    dsl: generation.Dsl = "triton",
    max_cost: generation.MaxCost = None,
    max_tokens: generation.MaxTokens = None,
    reply_tokens: generation.ReplyTokens = 16384,
    parallel: generation.Parallel = 8,
    prompts: generation.PromptsFolder = None,
    prices: generation.PricesFile = None,
    transcript: generation.TranscriptFile = None,
    record: generation.RecordFile = None,
) -> int:
    """Judge every kernel of a backend on every case of a suite, each kernel in its own process."""
    wanted, of_dtypes = parse_names("--ops", ops), parse_names("--dtypes", dtypes)
    if format_ not in _SHOW:
        raise OpforgeError(f"unknown format {format_!r}; allowed: {', '.join(_SHOW)}")
    default = registry.load("executors", executor).default_workers
    placed: dict[str, Any] = {
        "executor": executor,
        "ray_address": ray_address,
        "workers": default if workers is None else workers,
    }
    if resume is not None:
        config, folder = _resumed(context, resume, placed), resume
    else:
        folder = out or _default_folder(suite, backend)
        config = RunConfig(
            suite=suite,
            backend=backend,
            ops=wanted,
            device=device,
            dtypes=tuple(dict.fromkeys(map(parse_dtype, of_dtypes))),
            ops_directory=ops_directory or _default_directory(backend, folder),
            implementations=parse_implementations(implementation or []),
            custom_ops_root=custom_ops_root,
            p=p,
            timeout_s=timeout,
            race_s=race_seconds,
            memory_gib=memory_gib,
            allow_fallback=allow_fallback,
            confine=not no_confine,
            runtime=runtime,
            topn=topn,
            sample=sample,
            profile=profile,
            max_mib=max_mib,
            generation=generation.generation_settings(context, backend, device),
            **placed,
        )
    find_suite(config.suite)  # a misspelt name is answered before anything is imported
    registry.load("backends", config.backend)
    return _judge(config, folder, resume=resume is not None, format_=format_)


def _judge(config: RunConfig, folder: Path, *, resume: bool, format_: str) -> int:
    try:
        return _judge_and_report(config, folder, resume=resume, format_=format_)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise _disk_full(error, folder) from None


def _disk_full(error: OSError, folder: Path) -> DiskFullError:
    """Return the error for a run that found no space; it names the verdicts that are kept."""
    from opforge.runs.store import read_manifest, read_rows

    try:
        planned = read_manifest(folder).plan.cases
    except OpforgeError:  # not even the manifest could be written
        return DiskFullError(error, "nothing was kept; ")
    kept = sum(1 for _ in read_rows(folder))
    return DiskFullError(
        error,
        f"{kept} of {planned} verdicts are kept in {folder}; ",
        f"free some space and continue with `opforge run --resume {folder}`",
    )


def _judge_and_report(config: RunConfig, folder: Path, *, resume: bool, format_: str) -> int:
    from opforge.reports.run_files import write_reports
    from opforge.runs import run as judge

    try:
        with ProgressLine() as progress, raise_on_sigterm():
            result = judge(config, folder, resume=resume, progress=progress, notice=progress.notice)
    except KeyboardInterrupt as interrupt:
        if (folder / "results.jsonl").exists():
            sys.stderr.write(f"results so far are kept; continue with `opforge run --resume {folder}`\n")
            _write_partial_report(folder)
        if isinstance(interrupt, Terminated):
            raise typer.Exit(SIGTERM_EXIT_CODE) from None
        raise
    warn_about_confinement(config, result.manifest.confinement)
    complete = generation.print_generation_summary(folder)
    write_reports(folder, result.summary)
    _SHOW[format_](folder, result)
    return result.summary.exit_code if complete else 1


def _write_partial_report(folder: Path) -> None:
    """Write the report files of an interrupted run, from the rows stored so far."""
    from opforge.reports.run_files import write_reports
    from opforge.runs.score import Summary
    from opforge.runs.store import is_locked, read_manifest, read_rows

    if not is_locked(folder):  # by another process, into whose run this one would have gone
        write_reports(folder, Summary.from_rows(read_manifest(folder), read_rows(folder)))


def _show_text(folder: Path, result: RunResult) -> None:
    from opforge.reports.terminal import console_for_results, print_run

    console = console_for_results()
    print_run(console, result.manifest, result.summary)
    console.print(f"results      {folder}", soft_wrap=True)


def _show_json(folder: Path, result: RunResult) -> None:
    from opforge.reports.feedback import feedback
    from opforge.runs.store import read_rows

    report = feedback(result.summary, read_rows(folder))
    report["scores"] = {**report["scores"], "out": str(folder)}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def _show_junit(folder: Path, result: RunResult) -> None:
    from opforge.reports.junit import run_document
    from opforge.runs.store import read_rows

    sys.stdout.writelines(run_document(result.manifest, result.summary, read_rows(folder)))


def _show_github(_folder: Path, result: RunResult) -> None:
    from opforge.reports import github

    sys.stdout.writelines(github.workflow_commands(result.manifest, result.summary, github.workspace()))
    github.append_step_summary(github.step_summary(result.manifest, result.summary))


_SHOW = {"text": _show_text, "json": _show_json, "junit": _show_junit, "github": _show_github}


def warn_about_confinement(config: RunConfig, confinement: dict[str, Any] | None) -> None:
    """Warn on stderr if kernels ran with missing protections."""
    if not config.confine:
        sys.stderr.write(
            "kernels ran unconfined (--no-confine): they had access to your files, network and processes\n"
        )
    elif confinement is not None and (missing := confinement["missing"]):
        sys.stderr.write(f"not protected on this system: {', '.join(missing)} (see docs/confinement.md)\n")


def _resumed(context: typer.Context, folder: Path, executor_settings: dict[str, Any]) -> RunConfig:
    """Return the settings of a run that is taken up again; they come from its manifest, but for where it is done."""
    from dataclasses import replace

    from opforge.runs.store import read_manifest

    sources = {n: context.get_parameter_source(n) for n in context.params}
    given = [n for n, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if clash := [n for n in given if n not in _OPTIONS_WITH_RESUME]:
        raise OpforgeError(
            f"--{clash[0].strip('_').replace('_', '-')} cannot be combined with --resume: the settings come from the "
            "run's manifest"
        )
    config = replace(RunConfig.from_json(read_manifest(folder).config), **executor_settings)
    bounds = {n: context.params[n] for n in generation.BUDGET_OPTIONS if n in given}
    return replace(config, generation=generation.with_new_budget(folder, config, bounds)) if bounds else config


def parse_names(option: str, text: str | None) -> tuple[str, ...]:
    """Return the names in an option such as ``--ops add,sub``; none when it is not given."""
    names = tuple(filter(None, (name.strip() for name in (text or "").split(","))))
    if text is not None and not names:
        raise OpforgeError(f"{option} is empty; leave it out to take all")
    return names


def parse_implementations(arguments: list[str]) -> dict[str, str]:
    """Return which implementation was named for which folder."""
    chosen = {}
    for word in arguments:
        folder, sign, name = word.partition("=")
        if not (sign and folder and name):
            raise OpforgeError(f"--implementation {word!r} is not FOLDER=NAME, for example relu=relu_implementation_1")
        chosen[folder] = name
    return chosen


def _default_directory(backend: str, folder: Path) -> str:
    return str(folder / "generated_kernels") if backend in generation.LLM_BACKENDS else "generated_kernels"


def _default_folder(suite: str, backend: str) -> Path:
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    return Path("opforge-runs") / f"{stamp}-{short_name(suite)}-{backend}"
