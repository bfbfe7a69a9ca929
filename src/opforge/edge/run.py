"""Run programs in processes of their own, and explain failures.

One child forks a process for each program. Only the child needs torch.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opforge.edge import toolchain
from opforge.edge.bindings import custom_operators
from opforge.edge.child import CHILD_LIMIT_S, Message, ask
from opforge.edge.program import check_program, kernel_calls
from opforge.errors import OpforgeError
from opforge.procs import linux
from opforge.procs.forks import Send, run_fork

_RESULTS_FILE, _TRACE_FILE = "results.safetensors", "trace.etdp"
_MISSING = re.compile(r"Missing operator: \[\d+\] (\S+)")
_DUPLICATE_OPERATOR = re.compile(r"Re-registering (\S+?),")
_MISSING_BACKEND = re.compile(r"Backend (\S+) is not registered")
_FAILED_CHECK = re.compile(
    r"^\[(?P<where>[\w.]+:\d+)\] "
    r"(?P<what>.*(?:Check failed|assert failed|Attempted to resize|unexpected scalar type).*)$",
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
class ProgramOutput:
    """One result of a program: a tensor, or another value."""

    type: str = ""
    """Shape and dtype of a tensor, in the text form of a case's arguments."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    first: tuple[Any, ...] = ()
    """First elements of a tensor."""
    value: Any = None

    def as_json(self) -> dict[str, Any]:
        if not self.type:
            return {"value": self.value}
        return {"type": self.type, "shape": self.shape, "dtype": self.dtype, "first": self.first}


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a run."""

    job: ProgramJob
    results: tuple[ProgramOutput, ...] = ()
    inputs: str = ""
    kernels: dict[str, int] = field(default_factory=dict)
    """How often each operator's kernel ran, according to the event trace."""
    seconds: float = 0.0
    error: str = ""
    """Why there are no results; empty if there are."""
    missing: tuple[str, ...] = ()
    """Operators without a registered kernel."""


@dataclass(frozen=True, slots=True)
class JobList(Message):
    """Programs to run, each with a folder for its files."""

    jobs: tuple[ProgramJob, ...]
    folders: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ForkAnswer(Message):
    """Answer of the fork that runs one program."""

    results: tuple[ProgramOutput, ...] = ()
    inputs: str = ""
    seconds: float = 0.0
    error: str = ""
    raised: bool = False
    """Whether the error is an exception of the runtime or a kernel, not one of opforge."""


@dataclass(frozen=True, slots=True)
class ForkReport:
    """How a fork ended."""

    answer: ForkAnswer
    """Empty if the fork ended before it answered."""
    status: int
    hung: bool
    stage: str
    """What it did last: ``library PATH``, ``program``, ``inputs``, ``run`` or ``results``."""
    output: str


@dataclass(frozen=True, slots=True)
class ForkReports(Message):
    """The reports of all jobs."""

    jobs: tuple[ForkReport, ...]


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
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as place:
        folders = tuple(Path(place) / str(number) for number in range(len(jobs)))
        question = JobList(tuple(_with_full_paths(job) for job in jobs), folders)
        total_limit_s = CHILD_LIMIT_S + sum(job.limit_s for job in jobs)
        reports = ask(run_jobs, question, label="running a program", limit_s=total_limit_s).jobs
        return [_run_result(*run) for run in zip(jobs, folders, reports, strict=True)]


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


def _with_full_paths(job: ProgramJob) -> ProgramJob:
    return replace(
        job,
        program=job.program.resolve(),
        libraries=tuple(library.resolve() for library in job.libraries),
        inputs_file=job.inputs_file.resolve() if job.inputs_file else None,
        tensors_file=job.tensors_file.resolve() if job.tensors_file else None,
    )


def run_jobs(question: JobList) -> ForkReports:
    """Run programs, each in a fork: a step of the child. A kernel may end its fork."""
    import torch
    from executorch.runtime import Runtime  # noqa: F401  # imported here once for all forks

    from opforge.edge import program_inputs  # noqa: F401

    torch.set_num_threads(1)
    return ForkReports(tuple(map(_run_in_fork, question.jobs, question.folders)))


def _run_in_fork(job: ProgramJob, folder: Path) -> ForkReport:
    folder.mkdir()

    def answer(send: Send) -> dict[str, Any]:
        try:
            return _execute(job, folder, send).wire()
        except OpforgeError as error:
            return ForkAnswer(error=str(error)).wire()
        except Exception as error:  # noqa: BLE001  # boundary: the runtime or a kernel may raise anything
            return ForkAnswer(error=f"{type(error).__name__}: {error}", raised=True).wire()

    ended = run_fork(answer, job.limit_s)
    stage = ended.sent[-1] if ended.sent else ""
    return ForkReport(ForkAnswer.from_wire(ended.answer or {}), ended.code, ended.timed_out, stage, ended.output)


def _execute(job: ProgramJob, folder: Path, send_stage: Send) -> ForkAnswer:
    """Run a program in this process, and write its results and event trace into a folder."""
    from executorch.runtime import Runtime

    from opforge.edge import program_inputs

    for library in job.libraries:
        send_stage(f"library {library}")
        ctypes.CDLL(str(library))
    send_stage("program")
    program = Runtime.get().load_program(job.program, enable_etdump=True, debug_buffer_size=0)
    method = program.load_method("forward")
    if method is None:
        raise OpforgeError(f"{job.program} has no method forward; it has {', '.join(sorted(program.method_names))}")
    send_stage("inputs")
    values = program_inputs.job_inputs(job, method.metadata)
    send_stage("run")
    start = time.perf_counter()
    results = list(method.execute(values))
    seconds = time.perf_counter() - start
    send_stage("results")
    program_inputs.save_tensors(folder / _RESULTS_FILE, results)
    program.write_etdump_result_to_file(str(folder / _TRACE_FILE), str(folder / "debug.bin"))
    outputs = tuple(map(program_inputs.describe_output, results))
    return ForkAnswer(outputs, program_inputs.inputs_text(tuple(values)), seconds)


def _run_result(job: ProgramJob, folder: Path, report: ForkReport) -> ProgramResult:
    missing = tuple(dict.fromkeys(_MISSING.findall(report.output)))
    if error := _failure_reason(job, report, missing):
        return ProgramResult(job, error=error, missing=missing)
    calls = kernel_calls(job.program, folder / _TRACE_FILE)
    if job.out is not None:
        job.out.write_bytes((folder / _RESULTS_FILE).read_bytes())
    answer = report.answer
    return ProgramResult(job, answer.results, answer.inputs, calls, answer.seconds)


def _failure_reason(job: ProgramJob, report: ForkReport, missing: Sequence[str]) -> str:
    """Return why a run failed: a known cause first, else the runtime's last output."""
    output, stage, error = report.output, report.stage, report.answer.error
    if report.hung:
        return f"{job.program} was stopped after {job.limit_s:g} s without a result (at: {stage})"
    if missing:
        return _missing_kernel_message(job, missing)
    if (duplicate := _DUPLICATE_OPERATOR.search(output)) is not None:
        return (
            f"{stage.removeprefix('library ')} registers {duplicate[1]}, which is registered already, by another "
            "library or by ExecuTorch itself; the runtime ends the process then. "
            "Give one library only, or rename the operator"
        )
    if (backend := _MISSING_BACKEND.search(output)) is not None:
        return (
            f"{job.program} is delegated to {backend[1]}, which this runtime does not have; "
            "export it without, or install a runtime with it"
        )
    ended = f"{job.program}: the process {linux.describe_returncode(report.status)}"
    if report.status < 0:
        return f"{ended} {_stage_text(stage)}.{_failed_checks(output)}"
    if not error:
        return ended if report.status else ""
    if not report.answer.raised:
        return error
    message = error.partition(": ")[2]
    if stage.startswith("library "):
        return f"library {stage.removeprefix('library ')} cannot be loaded: {message}"
    if "set_inputs" in error:
        return (
            f"the inputs do not fit {job.program}.{_failed_checks(output)}. "
            "Give inputs as it was exported for, or export it with --dynamic"
        )
    return f"{job.program} failed {_stage_text(stage)}: {message}.{_failed_checks(output)}"


def _missing_kernel_message(job: ProgramJob, missing: Sequence[str]) -> str:
    libraries = ", ".join(str(library) for library in job.libraries) or "no library was given"
    message = f"{job.program} needs {', '.join(missing)}, and no kernel is registered for it ({libraries}); "
    if custom_operators(missing):
        command = f"opforge edge build DIR --model {job.program}"
        return f"{message}build a library that has it, `{command}`, and give it with --library"
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
