"""Run an operator folder's model in ExecuTorch, and compare the results with eager PyTorch.

Only the steps of the child need torch.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.edge import toolchain
from opforge.edge.bindings import BindingEntry, BindingError, Selection, custom_operators
from opforge.edge.build import DEFINITIONS_FILE, MODEL_FILE, EdgeLibrary, OperatorFolder, build, read_folder
from opforge.edge.child import Message, ask
from opforge.edge.export import parse_target
from opforge.edge.from_package import is_unwritten
from opforge.edge.run import ProgramJob, ProgramResult, run_programs
from opforge.edge.toolchain import BuildOptions
from opforge.errors import NothingToJudgeError
from opforge.models.target import ModelTarget

Progress = Callable[[str, int, int], None]
_STEPS = 5


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One run, or one program that could not be exported."""

    case: str
    """Inputs in the text form of a case's arguments."""
    kind: str
    """``static``, ``dynamic``, ``calls`` (each operator by itself) or ``without`` an operator."""
    verdict: str
    """``passed``, ``wrong``, ``crashed`` or ``error``."""
    reason: str = ""
    difference: float | None = None
    """Largest difference from eager PyTorch."""
    kernels: dict[str, int] = field(default_factory=dict)
    """How often each of the folder's kernels ran, according to the event trace."""


@dataclass(frozen=True, slots=True)
class EdgeCheckReport:
    """Result of a check."""

    folder: str
    versions: dict[str, str]
    operators: tuple[str, ...]
    """The checked operators."""
    unused: tuple[str, ...]
    """The operators that the model does not use; they were not checked."""
    tool: str
    library_bytes: int
    rows: tuple[CheckRow, ...]
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        return 0 if all(row.verdict == "passed" for row in self.rows) else 1

    def counts(self) -> dict[str, int]:
        return dict(Counter(row.verdict for row in self.rows))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts(), "right": self.exit_code == 0}


@dataclass(frozen=True, slots=True)
class FolderQuestion(Message):
    """A folder with a model to export."""

    definitions: Path | None
    """The file that registers its operators, if it has one."""
    entries: tuple[BindingEntry, ...]
    target: ModelTarget
    out: Path
    """Folder to write programs and tensors to."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Inputs of a program, and the results that eager PyTorch gives for them.

    Tensors are in files of the folder. The fields hold the other values, and None for each tensor.
    """

    case: str
    """Inputs in the text form of a case's arguments."""
    folder: Path
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]
    place: tuple[int, int] = (0, 0)
    """Position among the model's case groups, and in its group."""


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """A program of the model, or the reason why it could not be exported."""

    kind: str
    """``static``, ``dynamic`` or ``calls``."""
    example: str
    """Inputs that it was exported for."""
    program: Path = Path()
    operators: tuple[str, ...] = ()
    runs: tuple[PlannedRun, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class CheckedPrograms(Message):
    programs: tuple[CheckedProgram, ...]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run with results to compare."""

    planned: PlannedRun
    calls: int
    """How many kernels ran; between them, results are rounded."""


@dataclass(frozen=True, slots=True)
class FinishedRuns(Message):
    """Runs to compare, and the folder that defines what is right."""

    folder: FolderQuestion
    runs: tuple[FinishedRun, ...]


@dataclass(frozen=True, slots=True)
class ResultComparison:
    reason: str
    """Why the results are wrong; empty if they are right."""
    difference: float
    """Largest difference from eager PyTorch."""


@dataclass(frozen=True, slots=True)
class ResultComparisons(Message):
    runs: tuple[ResultComparison, ...]


def check(path: Path, *, tool: str = "direct", progress: Progress = _silent) -> EdgeCheckReport:
    """Check a folder's schemas and exports, build the selected library, and run the programs.

    Runs with an operator left out must fail because it is missing.
    """
    folder, package = read_folder(path), toolchain.find_executorch()
    model = parse_target(str(path / MODEL_FILE))
    work = path / "build" / "check"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    timer = _StepTimer()
    _refuse_unwritten(folder)
    names = [entry.name for entry in folder.entries]
    progress("building", 0, _STEPS)
    built = _library(folder, names, work / "library", tool)  # first: what has no kernel shows at once
    timer.lap("build")
    progress("exporting", 1, _STEPS)
    question = _question(folder, model, work)
    programs = ask(prepare_programs, question, label=f"exporting {path / MODEL_FILE}").programs
    timer.lap("export")
    used = sorted({name for program in programs for name in custom_operators(program.operators)})
    if not used and not any(program.error for program in programs):
        raise NothingToJudgeError(
            f"{path / MODEL_FILE} uses no operator of {path / 'ops.yaml'}; there is nothing to check"
        )
    _refuse_unbound(folder, used)
    progress("building", 2, _STEPS)
    if len(used) < len(names):
        built = _library(folder, used, work / "library", tool)
    halves = [half for half in (used[0::2], used[1::2]) if half]
    reduced = [
        _library(folder, [name for name in used if name not in half], work / f"without-{number}", tool)
        for number, half in enumerate(halves)
    ]
    timer.lap("build")
    progress("running", 3, _STEPS)
    planned = [(program, run) for program in programs for run in program.runs]
    negative = [
        _NegativeRun(name, half, library, _program_using(programs, name))
        for half, library in zip(halves, reduced, strict=True)
        for name in half
    ]
    ran = run_programs(_jobs(planned, built) + [run.job() for run in negative])
    timer.lap("run")
    progress("comparing", 4, _STEPS)
    rows = [CheckRow(program.example, program.kind, "error", program.error) for program in programs if program.error]
    rows += _judged(question, planned, ran[: len(planned)])
    rows += [run.judged(result) for run, result in zip(negative, ran[len(planned) :], strict=True)]
    timer.lap("compare")
    versions = {"executorch": package.version, "torch": cache.torch_version()}
    unused = tuple(entry.name for entry in folder.entries if entry.name not in used)
    return EdgeCheckReport(
        str(path), versions, tuple(used), unused, tool, built.bytes if built else 0, tuple(rows), timer.laps
    )


class _StepTimer:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


def _question(folder: OperatorFolder, target: ModelTarget, work: Path) -> FolderQuestion:
    path = folder.path / DEFINITIONS_FILE
    return FolderQuestion(path.resolve() if path.is_file() else None, folder.entries, target, work.resolve())


def prepare_programs(question: FolderQuestion) -> CheckedPrograms:
    """Import the folder's operators, and export its model for all programs to check.

    A step of the child. The operators are compared with the entries of the YAML file.
    """
    from opforge.edge import model_cases

    loaded, groups = model_cases.load_groups(question)
    programs = (
        model_cases.export_group(loaded, group, question.entries, question.out / f"{number}.pte", number)
        for number, group in enumerate(groups)
    )
    return CheckedPrograms(tuple(programs))


def compare_results(question: FinishedRuns) -> ResultComparisons:
    """Compare the results of runs with the expected ones: a step of the child."""
    from opforge.edge.model_cases import RunComparer

    return ResultComparisons(tuple(map(RunComparer(question.folder).compare, question.runs)))


def _refuse_unwritten(folder: OperatorFolder) -> None:
    """Raise if kernels are as `opforge edge take` made them: they refuse to run."""
    if unwritten := [str(path) for path in folder.sources if is_unwritten(path.read_text(errors="replace"))]:
        raise BindingError(
            f"{', '.join(unwritten)}: not written yet; write the kernel in place of the line with NotImplemented"
        )


def _refuse_unbound(folder: OperatorFolder, used: Sequence[str]) -> None:
    known = [entry.name for entry in folder.entries]
    if unbound := [name for name in used if name not in known]:
        raise BindingError(
            f"{folder.path / MODEL_FILE} uses {', '.join(unbound)}, and {folder.bindings_file} has no entry for it "
            f"(it binds {', '.join(known)}); add one, and a kernel"
        )


def _library(folder: OperatorFolder, names: Sequence[str], out: Path, tool: str) -> EdgeLibrary | None:
    """Build a library with the given operators only; None if there are none."""
    return build(folder, Selection(tuple(names), "for the check"), out, BuildOptions(tool)) if names else None


def _jobs(planned: Sequence[tuple[CheckedProgram, PlannedRun]], built: EdgeLibrary | None) -> list[ProgramJob]:
    libraries = (built.library,) if built else ()
    return [
        ProgramJob(
            program.program, libraries, tensors_file=run.folder / "inputs.safetensors", non_tensors=run.inputs,
            out=run.folder / "results.safetensors",
        )
        for program, run in planned
    ]  # fmt: skip


def _judged(
    folder: FolderQuestion, planned: Sequence[tuple[CheckedProgram, PlannedRun]], results: Sequence[ProgramResult]
) -> Iterator[CheckRow]:
    finished = tuple(
        FinishedRun(run, sum(result.kernels.values()))
        for (_, run), result in zip(planned, results, strict=True)
        if not result.error
    )
    question = FinishedRuns(folder, finished)
    compared = iter(ask(compare_results, question, label="comparing results").runs if finished else ())
    for (program, run), result in zip(planned, results, strict=True):
        if result.error:
            verdict = "crashed" if " died of " in result.error else "error"
            reason = result.error.replace(str(program.program), "the program")  # the case names it
            yield CheckRow(run.case, program.kind, verdict, reason)
        else:
            yield _row(program, run, result, next(compared))


def _row(program: CheckedProgram, run: PlannedRun, result: ProgramResult, comparison: ResultComparison) -> CheckRow:
    kernels = {name: result.kernels.get(name, 0) for name in custom_operators(program.operators)}
    idle = [name for name, count in kernels.items() if not count]
    reason = comparison.reason or (f"the event trace has no call of {', '.join(idle)}" if idle else "")
    verdict = "wrong" if reason else "passed"
    return CheckRow(run.case, program.kind, verdict, reason, comparison.difference, kernels)


def _program_using(programs: Sequence[CheckedProgram], name: str) -> CheckedProgram:
    return next(program for program in programs if name in program.operators)


@dataclass(frozen=True, slots=True)
class _NegativeRun:
    """A run without one operator, and perhaps without others too.

    It must fail because that operator is missing.
    """

    name: str
    left_out: Sequence[str]
    library: EdgeLibrary | None
    program: CheckedProgram

    def job(self) -> ProgramJob:
        return ProgramJob(self.program.program, (self.library.library,) if self.library else ())

    def judged(self, result: ProgramResult) -> CheckRow:
        kind = f"without {self.name}"
        if self.name in result.missing and set(result.missing) <= set(self.left_out):
            return CheckRow(self.program.example, kind, "passed")
        reason = result.error or "it ran, although its kernel was left out; find out what registers it"
        return CheckRow(self.program.example, kind, "wrong", f"the runtime should have missed {self.name}: {reason}")
