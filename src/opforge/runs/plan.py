"""The plan of a run: the selected operators, their cases, and the kernel for each, if any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opforge.backends import Backend
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError, OpforgeError
from opforge.kernels import Kernel
from opforge.ops import table
from opforge.runs.config import RunConfig
from opforge.runs.generation_context import KernelGenerator
from opforge.runs.rows import VerdictKey
from opforge.suites import LoadedSuite, Suite, SuiteOptions
from opforge.suites.base import MakeCases, Progress
from opforge.suites.case_selection import CaseSelection
from opforge.suites.lookup import find_suite


@dataclass(frozen=True, slots=True)
class OperatorCases:
    """The cases of one operator in a job."""

    op: str
    required: bool
    cases: list[Case]

    def wire(self) -> dict[str, Any]:
        cases = [[c.id, c.args if not c.tree else "", c.tree, c.expect, c.phase, c.blob] for c in self.cases]
        return {"op": self.op, "required": self.required, "cases": cases}


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel with all its cases: the work of one worker process."""

    kernel: Kernel
    operators: tuple[OperatorCases, ...]
    stop_on: str = ""
    """``rejected``: stop at the first case that rejects the kernel."""
    all_ops: tuple[str, ...] = ()
    """The operators of the whole job, if this is only a part of it."""

    @property
    def case_count(self) -> int:
        return sum(len(part.cases) for part in self.operators)

    def in_phase(self, phase: Phase) -> Job:
        """Return the part of the job in one phase that can be run."""
        parts = (replace(p, cases=[c for c in p.cases if c.phase is phase and not c.lost]) for p in self.operators)
        return replace(self, operators=tuple(p for p in parts if p.cases))

    def without(self, done: set[VerdictKey]) -> Job:
        """Return the job without the cases that already have a verdict."""
        parts = (
            OperatorCases(p.op, p.required, [c for c in p.cases if (self.kernel.name, p.op, c.id, c.phase) not in done])
            for p in self.operators
        )
        return replace(self, operators=tuple(p for p in parts if p.cases))


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs, and the operators without a kernel."""

    suite: LoadedSuite
    jobs: tuple[Job, ...]
    missing: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def case_count(self) -> int:
        return sum(job.case_count for job in self.jobs)

    @property
    def optional(self) -> frozenset[str]:
        """Return the operators that a kernel may decline."""
        return frozenset(p.op for job in self.jobs for p in job.operators if not p.required)

    @property
    def scores_kernels(self) -> bool:
        """Whether each kernel is scored by itself: several kernels may serve a custom operator."""
        return any(job.kernel.reference is not None for job in self.jobs)

    @property
    def unit_count(self) -> int:
        """Return the denominator of the scores: the number of operators, or of kernels.

        It counts kernels if those are scored separately. Operators without a kernel count too.
        """
        return len(self.jobs) + len(self.missing) if self.scores_kernels else len(self.suite.cases)

    @property
    def timed_units(self) -> tuple[str, ...]:
        """Return the operators, or kernels, to be timed, including operators without a kernel."""
        cases = self.suite.cases.items()
        ops = [op for op, op_cases in cases if any(c.phase is Phase.PERFORMANCE for c in op_cases)]
        if not self.scores_kernels:
            return tuple(ops)
        timed = [job.kernel.name for job in self.jobs if any(p.op in ops for p in job.operators)]
        return (*timed, *(op for op in self.missing if op in ops))


def selected_ops(config: RunConfig, suite: Suite) -> frozenset[str] | None:
    """Return the full names of the selected operators; None for all. A misspelt one raises."""
    if not config.ops:
        return None
    named = getattr(suite, "operators", None)  # see NamesItsOperators
    if named is not None:
        return frozenset(named(SuiteOptions(custom_ops_root=Path(config.custom_ops_root)), config.ops))
    return frozenset(op.name for op in table().select(config.ops))


def load_suite(
    config: RunConfig,
    progress: Progress,
    suite: Suite | None = None,
    *,
    make: MakeCases | None = None,
    folder: Path | None = None,
) -> LoadedSuite:
    """Return the suite's cases for a configuration; the default suite is the registered one."""
    suite = suite or find_suite(config.suite)
    ops = selected_ops(config, suite)
    if config.selection != CaseSelection() and not getattr(suite, "weighted", False):
        raise OpforgeError(
            f"--topn, --sample, --profile and --max-mib need cases with weights, and those of suite {config.suite!r} "
            "have none; use a file of `opforge trace` or an operator-input log"
        )
    options = SuiteOptions(
        config.device, config.dtypes, ops, Path(config.custom_ops_root), make, folder, config.selection
    )
    loaded: LoadedSuite = suite.load(options, progress)
    if not loaded.cases:
        problem = (
            f"suite {config.suite!r} has no cases for {', '.join(config.ops)}"
            if config.ops
            else f"suite {config.suite!r} is empty"
        )
        raise NothingToJudgeError(f"{problem} with dtypes {', '.join(config.dtypes)} on {config.device}")
    return loaded


def make_plan(config: RunConfig, backend: Backend, suite: LoadedSuite) -> Plan:
    """Match a suite's operators with a backend's kernels."""
    kernels = backend.kernels(suite.cases)
    if not kernels and not isinstance(backend, KernelGenerator):  # a backend that makes kernels reports why it has none
        raise NothingToJudgeError(
            f"backend {config.backend!r} implements none of the {len(suite.cases)} operators that suite "
            f"{config.suite!r} selects" + "".join(f"; {remark}" for remark in getattr(backend, "remarks", ()))
        )
    jobs = tuple(Job(k, tuple(_parts(k, suite))) for k in kernels)
    served = {part.op for job in jobs for part in job.operators}
    missing = tuple(op for op in suite.cases if op not in served)
    return Plan(suite, jobs, missing, tuple(_remarks(config, backend)))


def _remarks(config: RunConfig, backend: Backend) -> Iterable[str]:
    """Report which folders and kernels of the selection are not judged, and why."""
    for reason in getattr(backend, "skipped", ()):
        yield f"ignored: {reason}"
    yield from getattr(backend, "remarks", ())
    idle = getattr(backend, "idle", ())
    wanted = {op.name for op in table().select(config.ops)} if config.ops and idle else None
    for kernel in idle:
        if wanted is None or any(s.op in wanted for s in kernel.serves):
            yield f"{kernel.name} is not judged: suite {config.suite!r} has no case for {kernel.primary}"


def _parts(kernel: Kernel, suite: LoadedSuite) -> Iterable[OperatorCases]:
    for served in kernel.serves:
        if cases := suite.cases.get(served.op):
            yield OperatorCases(served.op, served.required, cases)
