"""Run programs in processes of their own, and explain failures. Needs no torch."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opforge.edge import toolchain
from opforge.edge.child import CHILD_LIMIT_S, ask
from opforge.edge.event_trace import kernel_calls
from opforge.edge.selection import check_program, custom_operators
from opforge.errors import OpforgeError
from opforge.procs import linux

_MISSING = re.compile(r"Missing operator: \[\d+\] (\S+)")
_DUPLICATE_OPERATOR = re.compile(r"Re-registering (\S+?),")
_MISSING_BACKEND = re.compile(r"Backend (\S+) is not registered")
_FAILED_CHECK = re.compile(
    r"^\[(?P<where>[\w.]+:\d+)\] (?P<what>.*(?:Check failed|assert failed|Attempted to resize|unexpected scalar type).*)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """One run of a program."""

    program: Path
    libraries: tuple[Path, ...] = ()
    inputs_text: str = ""
    """Inputs in the text form of a case's arguments.

    Without text, file and values, inputs are made as the program describes them.
    """
    inputs_file: Path | None = None
    """A safetensors file of inputs."""
    tensors_file: Path | None = None
    """A safetensors file of inputs; ``non_tensors`` holds those that are numbers."""
    non_tensors: tuple[Any, ...] = ()
    seed: int = 0
    out: Path | None = None
    """File to write results to, as safetensors."""
    limit_s: float = 60.0
    """Time limit, without the start of the process."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a run."""

    job: ProgramJob
    results: tuple[dict[str, Any], ...] = ()
    """Shape, dtype and first elements of each result."""
    inputs: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    """How often each operator's kernel ran, according to the event trace."""
    seconds: float = 0.0
    error: str = ""
    """Why there are no results; empty if there are."""
    missing: tuple[str, ...] = ()
    """Operators without a registered kernel."""


class RunError(OpforgeError):
    """A program did not run to its end."""

    exit_code = 1


def run_programs(jobs: Sequence[ProgramJob]) -> list[ProgramResult]:
    """Run programs one after the other, each in a process of its own.

    A kernel that ends its process does not affect the others.
    """
    toolchain.find_executorch()
    for job in jobs:
        _check(job)
    if not jobs:
        return []
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as folder:
        places = [Path(folder) / str(number) for number in range(len(jobs))]
        rows = [_row(job, place) for job, place in zip(jobs, places, strict=True)]
        total_limit_s = CHILD_LIMIT_S + sum(job.limit_s for job in jobs)
        reply = ask("run_child", {"jobs": rows}, label="running a program", limit_s=total_limit_s)
        return [_run_result(job, place, row) for job, place, row in zip(jobs, places, reply["jobs"], strict=True)]


def run_program(job: ProgramJob) -> ProgramResult:
    """Run one program; raise RunError with the reason if it fails."""
    ran = run_programs([job])[0]
    if ran.error:
        raise RunError(ran.error)
    return ran


def _check(job: ProgramJob) -> None:
    check_program(job.program)
    for library in job.libraries:
        if not library.is_file():
            raise OpforgeError(f"there is no library {str(library)!r}; `opforge edge build` makes one")
    if job.inputs_file is not None and not job.inputs_file.is_file():
        raise OpforgeError(f"there is no file {str(job.inputs_file)!r} of inputs")


def _row(job: ProgramJob, place: Path) -> dict[str, Any]:
    place.mkdir()
    return {
        "place": str(place),
        "program": str(job.program.resolve()),
        "libraries": [str(library.resolve()) for library in job.libraries],
        "text": job.inputs_text,
        "file": str(job.inputs_file.resolve()) if job.inputs_file else "",
        "values": str(job.tensors_file.resolve()) if job.tensors_file else "",
        "others": list(job.non_tensors),
        "seed": job.seed,
        "limit_s": job.limit_s,
    }


def _run_result(job: ProgramJob, place: Path, row: dict[str, Any]) -> ProgramResult:
    missing = tuple(dict.fromkeys(_MISSING.findall(row["said"])))
    if error := _failure_reason(job, row, missing):
        return ProgramResult(job, error=error, missing=missing)
    calls = kernel_calls(job.program, place / "trace.etdp")
    if job.out is not None:
        job.out.write_bytes((place / "results.safetensors").read_bytes())
    return ProgramResult(job, tuple(row["results"]), row["inputs"], calls, row["seconds"])


def _failure_reason(job: ProgramJob, row: dict[str, Any], missing: Sequence[str]) -> str:
    """Return why a run failed: a known cause first, else the runtime's last output."""
    output, stage = row["said"], row["stage"]
    if row["hung"]:
        return f"{job.program} was stopped after {job.limit_s:g} s without a result (at: {stage})"
    if missing:
        return _missing_kernel_message(job, missing)
    if (duplicate := _DUPLICATE_OPERATOR.search(output)) is not None:
        return (
            f"{stage.removeprefix('library ')} registers {duplicate[1]}, which is registered already, by another library or by ExecuTorch itself; "
            "the runtime ends the process then. Give one library only, or rename the operator"
        )
    if (backend := _MISSING_BACKEND.search(output)) is not None:
        return f"{job.program} is delegated to {backend[1]}, which this runtime does not have; export it without, or install a runtime with it"
    if row["status"] < 0:
        return f"{job.program}: the process {linux.describe_returncode(row['status'])} {_stage_text(stage)}.{_failed_checks(output)}"
    if not row.get("error"):
        return "" if row["status"] == 0 else f"{job.program}: the process {linux.describe_returncode(row['status'])}"
    if not row.get("raised"):
        return str(row["error"])
    if stage.startswith("library "):
        return f"library {stage.removeprefix('library ')} cannot be loaded: {row['error'].partition(': ')[2]}"
    if "set_inputs" in row["error"]:
        return f"the inputs do not fit {job.program}.{_failed_checks(output)}. Give inputs as it was exported for, or export it with --dynamic"
    return f"{job.program} failed {_stage_text(stage)}: {row['error'].partition(': ')[2]}.{_failed_checks(output)}"


def _missing_kernel_message(job: ProgramJob, missing: Sequence[str]) -> str:
    libraries = ", ".join(str(library) for library in job.libraries) or "no library was given"
    message = f"{job.program} needs {', '.join(missing)}, and no kernel is registered for it ({libraries}); "
    if custom_operators(missing):
        return f"{message}build a library that has it, `opforge edge build DIR --model {job.program}`, and give it with --library"
    return f"{message}ExecuTorch's own kernels lack it: use other operators in the model, or delegate it (--xnnpack)"


def _stage_text(stage: str) -> str:
    if stage.startswith("library "):
        return f"while {stage.removeprefix('library ')} was loaded"
    return {"program": "while the program was loaded", "run": "while it ran"}.get(stage, "")


def _failed_checks(output: str) -> str:
    """Return the failed checks that the runtime or a kernel logged, else the last output."""
    checks = [f"{match['what'].strip()} ({match['where']})" for match in _FAILED_CHECK.finditer(output)]
    lines = checks or output.strip().splitlines()[-2:]
    return f" Output: {'; '.join(lines)[:800]}" if lines else ""
