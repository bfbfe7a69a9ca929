"""Assignments for a model: the kernel to write, and the cases it is judged on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opforge.backends.directory import implementations, kernel_in, operator_name
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError
from opforge.kernels import Kernel
from opforge.ops import Operator, table
from opforge.runs.plan import Job, Part
from opforge.suites import LoadedSuite

_STORAGE_LOCATION = re.compile(r", (?:at|nbytes)=\d+")
"""Position and size of a tensor's stored contents; they say nothing about the call."""
_LONGEST = 240


@dataclass(frozen=True, slots=True)
class Assignment:
    """A kernel to be written for an ATen operator.

    ``name`` is the name of its folder in a kernel directory.
    """

    name: str
    primary: Operator
    parts: tuple[Part, ...]

    @property
    def entry(self) -> str:
        """Function that the kernel file must define."""
        return f"{self.primary.base}_kernel_impl"

    @property
    def authority(self) -> str:
        """Source of the expected results, as verdicts name it."""
        return self.primary.authority

    def job(self, file: Path, name: str) -> Job:
        """Return the job that judges the kernel in a file, under the given kernel name."""
        kernel = kernel_in(file, self.name)
        parts = {part.op for part in self.parts}
        serves = tuple(served for served in kernel.serves if served.op in parts)
        return Job(replace(kernel, name=name, serves=serves), self.parts)

    def kernel(self, file: Path) -> Kernel:
        """Return the kernel in a kept file, with the name that a run gives it."""
        return kernel_in(file, operator_name(self.name))

    def next_file(self, root: Path, suffix: str) -> Path:
        """Return the file of the next implementation in the kernel's folder."""
        folder = root.resolve() / self.name
        taken = [file.stem.rpartition("_")[2] for file in implementations(folder)] if folder.is_dir() else []
        return folder / f"{self.name}_implementation_{next_number(taken)}{suffix}"

    def lay_out(self, root: Path) -> None:
        """Do nothing: a kernel is judged against ATen, which needs no files."""


def is_timed(parts: Iterable[Part]) -> bool:
    """Whether any case of a kernel is timed."""
    return any(case.phase is Phase.PERFORMANCE for part in parts for case in part.cases)


def next_number(taken: Iterable[str]) -> int:
    """Return one more than the largest number among the words; other words are ignored."""
    return max((int(word) for word in taken if word.isdecimal()), default=0) + 1


def assignments(suite: LoadedSuite) -> list[Assignment]:
    """Return the kernels to write for a suite: one per packet, for all overloads and variants."""
    names = dict.fromkeys(table().folder_of(op) for name in suite.cases if (op := table().get(name)) is not None)
    if not names:
        raise NothingToJudgeError(
            f"the operators of suite {suite.name!r} are neither ATen's nor those of --custom-ops-root; "
            "language models write kernels for these: see `opforge ls suites`"
        )
    kernels_to_write, served_ops = [], set[str]()
    for name in names:
        parts = tuple(part for part in _parts(name, suite) if part.op not in served_ops)
        served_ops |= {part.op for part in parts}
        if parts:
            kernels_to_write.append(Assignment(name, table().resolve(name), parts))
    return kernels_to_write


def _parts(name: str, suite: LoadedSuite) -> Iterable[Part]:
    for served in kernel_in(Path(name), name).serves:
        if cases := suite.cases.get(served.op):
            yield Part(served.op, served.required, cases)


def spread(cases: Sequence[Case], most: int) -> list[Case]:
    """Return up to ``most`` cases with distinct calls, spread from the shortest to the longest."""
    by_call = {call_text(case): case for case in cases}
    ordered = sorted(by_call.values(), key=lambda case: (len(case.args), case.args))
    if len(ordered) <= most:
        return ordered
    step = (len(ordered) - 1) / (most - 1) if most > 1 else 0
    return [ordered[round(number * step)] for number in range(most)]


def call_text(case: Case) -> str:
    """Return a case's call as text."""
    return without_places(case.args)


def without_places(call: str) -> str:
    """Return the text of a call without storage positions, cut to a maximum length."""
    text = _STORAGE_LOCATION.sub("", call)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
