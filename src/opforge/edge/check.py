"""Run an operator folder's model in ExecuTorch, and compare the results with eager PyTorch.

Needs no torch.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opforge import cache
from opforge.edge import toolchain
from opforge.edge.bindings import BindingError
from opforge.edge.build import DEFINITIONS_FILE, MODEL_FILE, BuiltLibrary, OperatorFolder, build, read_folder
from opforge.edge.child import ask
from opforge.edge.run import ProgramJob, ProgramResult, run_programs
from opforge.edge.selection import Selection, custom_operators
from opforge.edge.target import parse_target
from opforge.errors import NothingToJudgeError

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
    """``static``, ``dynamic`` or ``without`` an operator."""
    verdict: str
    """``passed``, ``wrong``, ``crashed`` or ``error``."""
    reason: str = ""
    difference: float | None = None
    """Largest difference from eager PyTorch."""
    kernels: dict[str, int] = field(default_factory=dict)
    """How often each of the folder's kernels ran, according to the event trace."""


@dataclass(frozen=True, slots=True)
class CheckReport:
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


def check(path: Path, *, tool: str = "direct", progress: Progress = _silent) -> CheckReport:
    """Check a folder's schemas and exports, build the selected library, and run the programs.

    Runs with an operator left out must fail because it is missing.
    """
    folder, package = read_folder(path), toolchain.find_executorch()
    model = parse_target(str(path / MODEL_FILE))
    work = path / "build" / "check"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    timer = _StepTimer()
    progress("exporting", 0, _STEPS)
    programs = _prepared(folder, model.wire(), work)
    timer.lap("export")
    used = sorted({name for one in programs for name in custom_operators(one.get("operators", []))})
    if not used and not any("error" in one for one in programs):
        raise NothingToJudgeError(
            f"{path / MODEL_FILE} uses no operator of {path / 'ops.yaml'}; there is nothing to check"
        )
    _refuse_unbound(folder, used)
    progress("building", 1, _STEPS)
    built = _library(folder, used, work / "library", tool)
    halves = [half for half in (used[0::2], used[1::2]) if half]
    reduced = [
        _library(folder, [one for one in used if one not in half], work / f"without-{number}", tool)
        for number, half in enumerate(halves)
    ]
    timer.lap("build")
    progress("running", 2, _STEPS)
    planned = [(one, run) for one in programs for run in one["runs"]]
    negative = [
        _NegativeRun(name, half, library, _program_using(programs, name))
        for half, library in zip(halves, reduced, strict=True)
        for name in half
    ]
    ran = run_programs(_jobs(planned, built) + [one.job() for one in negative])
    timer.lap("run")
    progress("comparing", 3, _STEPS)
    rows = [CheckRow(one["example"], one["kind"], "error", one["error"]) for one in programs if "error" in one]
    rows += _judged(planned, ran[: len(planned)])
    rows += [one.judged(result) for one, result in zip(negative, ran[len(planned) :], strict=True)]
    timer.lap("compare")
    versions = {"executorch": package.version, "torch": cache.torch_version()}
    unused = tuple(entry.name for entry in folder.entries if entry.name not in used)
    return CheckReport(
        str(path), versions, tuple(used), unused, tool, built.bytes if built else 0, tuple(rows), timer.laps
    )


class _StepTimer:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _prepared(folder: OperatorFolder, target: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    definitions = folder.path / DEFINITIONS_FILE
    request = {
        "step": "prepare",
        "definitions": str(definitions.resolve()) if definitions.is_file() else "",
        "entries": [asdict(entry) for entry in folder.entries],
        "target": target,
        "out": str(work.resolve()),
    }
    programs: list[dict[str, Any]] = ask("check_child", request, label=f"exporting {folder.path / MODEL_FILE}")[
        "programs"
    ]
    return programs


def _refuse_unbound(folder: OperatorFolder, used: Sequence[str]) -> None:
    known = [entry.name for entry in folder.entries]
    if unbound := [name for name in used if name not in known]:
        raise BindingError(
            f"{folder.path / MODEL_FILE} uses {', '.join(unbound)}, and {folder.bindings_file} has no entry for it "
            f"(it binds {', '.join(known)}); add one, and a kernel"
        )


def _library(folder: OperatorFolder, names: Sequence[str], out: Path, tool: str) -> BuiltLibrary | None:
    """Build a library with the given operators only; None if there are none."""
    return build(folder, Selection(tuple(names), "for the check"), out, tool=tool) if names else None


def _jobs(planned: Sequence[tuple[dict[str, Any], dict[str, Any]]], built: BuiltLibrary | None) -> list[ProgramJob]:
    libraries = (built.library,) if built else ()
    return [
        ProgramJob(
            Path(program["program"]), libraries, tensors_file=Path(run["place"]) / "inputs.safetensors",
            non_tensors=tuple(run["others"]), out=Path(run["place"]) / "results.safetensors",
        )
        for program, run in planned
    ]  # fmt: skip


def _judged(planned: Sequence[tuple[dict[str, Any], dict[str, Any]]], ran: Sequence[ProgramResult]) -> list[CheckRow]:
    answered = [run for (_, run), result in zip(planned, ran, strict=True) if not result.error]
    request = {"step": "compare", "runs": answered}
    compared = iter(ask("check_child", request, label="comparing results")["compared"] if answered else ())
    rows = []
    for (program, run), result in zip(planned, ran, strict=True):
        if result.error:
            rows.append(
                CheckRow(
                    run["case"], program["kind"], "crashed" if " died of " in result.error else "error", result.error
                )
            )
            continue
        comparison = next(compared)
        rows.append(_row(program, run, result, comparison))
    return rows


def _row(program: dict[str, Any], run: dict[str, Any], result: ProgramResult, comparison: dict[str, Any]) -> CheckRow:
    custom = custom_operators(program["operators"])
    kernels = {name: result.kernels.get(name, 0) for name in custom}
    idle = [name for name, count in kernels.items() if not count]
    reason = comparison["reason"] or (f"the event trace has no call of {', '.join(idle)}" if idle else "")
    return CheckRow(
        run["case"], program["kind"], "wrong" if reason else "passed", reason, comparison["difference"], kernels
    )


def _program_using(programs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(program for program in programs if name in program.get("operators", []))


@dataclass(frozen=True, slots=True)
class _NegativeRun:
    """A run without one operator, and perhaps without others too.

    It must fail because that operator is missing.
    """

    name: str
    left_out: Sequence[str]
    library: BuiltLibrary | None
    program: dict[str, Any]

    def job(self) -> ProgramJob:
        return ProgramJob(Path(self.program["program"]), (self.library.library,) if self.library else ())

    def judged(self, result: ProgramResult) -> CheckRow:
        kind = f"without {self.name}"
        if self.name in result.missing and set(result.missing) <= set(self.left_out):
            return CheckRow(self.program["example"], kind, "passed")
        reason = result.error or "it ran, although its kernel was left out; find out what registers it"
        return CheckRow(self.program["example"], kind, "wrong", f"the runtime should have missed {self.name}: {reason}")
