"""Assignments for a model: the kernel to write, and the cases it is judged on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opforge.backends.directory import implementation_files, kernel_from_file, operator_of_folder
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError
from opforge.kernels import Kernel
from opforge.ops import Operator, table
from opforge.runs.plan import Job, OperatorCases
from opforge.suites import LoadedSuite

_STORAGE_LOCATION = re.compile(r", (?:at|nbytes)=\d+")
"""Position and size of a tensor's stored contents; they say nothing about the call."""
_MAX_CALL_CHARS = 240


@dataclass(frozen=True, slots=True)
class AtenTask:
    """A kernel to be written for an ATen operator.

    ``name`` is the name of its folder in a kernel directory.
    """

    name: str
    operator: Operator
    parts: tuple[OperatorCases, ...]

    @property
    def entry(self) -> str:
        """Function that the kernel file must define."""
        return f"{self.operator.base}_kernel_impl"

    @property
    def authority(self) -> str:
        """Source of the expected results, as verdicts name it."""
        return self.operator.reference_name

    def job(self, file: Path, name: str) -> Job:
        """Return the job that judges the kernel in a file, under the given kernel name."""
        kernel = kernel_from_file(file, self.name)
        parts = {part.op for part in self.parts}
        serves = tuple(served for served in kernel.serves if served.op in parts)
        return Job(replace(kernel, name=name, serves=serves), self.parts)

    def kernel(self, file: Path) -> Kernel:
        """Return the kernel in a kept file, with the name that a run gives it."""
        return kernel_from_file(file, operator_of_folder(self.name))

    def next_file(self, root: Path, suffix: str) -> Path:
        """Return the file of the next implementation in the kernel's folder."""
        folder = root.resolve() / self.name
        taken = [file.stem.rpartition("_")[2] for file in implementation_files(folder)] if folder.is_dir() else []
        return folder / f"{self.name}_implementation_{next_number(taken)}{suffix}"

    def write_companions(self, root: Path) -> None:
        """Do nothing: a kernel is judged against ATen, which needs no files."""


def is_timed(parts: Iterable[OperatorCases]) -> bool:
    """Whether any case of a kernel is timed."""
    return any(case.phase is Phase.PERFORMANCE for part in parts for case in part.cases)


def next_number(taken: Iterable[str]) -> int:
    """Return one more than the largest number among the words; other words are ignored."""
    return max((int(word) for word in taken if word.isdecimal()), default=0) + 1


def aten_tasks(suite: LoadedSuite) -> list[AtenTask]:
    """Return the kernels to write for a suite: one per packet, for all overloads and variants."""
    names = dict.fromkeys(table().folder_of(op) for name in suite.cases if (op := table().get(name)) is not None)
    if not names:
        raise NothingToJudgeError(
            f"the operators of suite {suite.name!r} are neither ATen's nor those of --custom-ops-root; "
            "language models write kernels for these only: see `opforge ls suites`"
        )
    kernels_to_write, served_ops = [], set[str]()
    for name in names:
        parts = tuple(part for part in _parts(name, suite) if part.op not in served_ops)
        served_ops |= {part.op for part in parts}
        if parts:
            kernels_to_write.append(AtenTask(name, table().resolve(name), parts))
    return kernels_to_write


def _parts(name: str, suite: LoadedSuite) -> Iterable[OperatorCases]:
    for served in kernel_from_file(Path(name), name).serves:
        if cases := suite.cases.get(served.op):
            yield OperatorCases(served.op, served.required, cases)


def sample_cases(cases: Sequence[Case], max_cases: int) -> list[Case]:
    """Return up to ``most`` cases with distinct calls, spread from the shortest to the longest."""
    by_call = {call_text(case): case for case in cases}
    ordered = sorted(by_call.values(), key=lambda case: (len(case.args), case.args))
    if len(ordered) <= max_cases:
        return ordered
    step = (len(ordered) - 1) / (max_cases - 1) if max_cases > 1 else 0
    return [ordered[round(number * step)] for number in range(max_cases)]


def call_text(case: Case) -> str:
    """Return a case's call as text."""
    return without_storage(case.args)


def without_storage(call: str) -> str:
    """Return the text of a call without storage positions, cut to a maximum length."""
    text = _STORAGE_LOCATION.sub("", call)
    return text if len(text) <= _MAX_CALL_CHARS else text[:_MAX_CALL_CHARS] + " …"
