"""What a model is to write: a kernel for a packet of operators, and what it will be judged on."""

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

_STORED = re.compile(r", (?:at|nbytes)=\d+")
"""Where the contents of a tensor are stored, which says nothing about the call."""
_LONGEST = 240


@dataclass(frozen=True, slots=True)
class Assignment:
    """A kernel of an ATen operator that is to be written; its name is that of its folder in a kernel directory."""

    name: str
    primary: Operator
    parts: tuple[Part, ...]

    @property
    def entry(self) -> str:
        """The function that a kernel's file must have."""
        return f"{self.primary.base}_kernel_impl"

    @property
    def authority(self) -> str:
        """Whose answers count, as verdicts name it."""
        return self.primary.authority

    def job(self, file: Path, name: str) -> Job:
        """Return what has to be judged of the kernel in a file, under a name of its own."""
        kernel = kernel_in(file, self.name)
        parts = {part.op for part in self.parts}
        serves = tuple(served for served in kernel.serves if served.op in parts)
        return Job(replace(kernel, name=name, serves=serves), self.parts)

    def kernel(self, file: Path) -> Kernel:
        """Return the kernel in a file that was kept, as a run judges and names it."""
        return kernel_in(file, operator_name(self.name))

    def next_file(self, root: Path, suffix: str) -> Path:
        """Return the file of the next implementation in the kernel's folder."""
        folder = root.resolve() / self.name
        taken = [file.stem.rpartition("_")[2] for file in implementations(folder)] if folder.is_dir() else []
        return folder / f"{self.name}_implementation_{next_number(taken)}{suffix}"

    def lay_out(self, root: Path) -> None:
        """Do nothing: what a kernel is judged with is ATen, which is everywhere."""


def is_timed(parts: Iterable[Part]) -> bool:
    """Whether anything of a kernel is timed."""
    return any(case.phase is Phase.PERFORMANCE for part in parts for case in part.cases)


def next_number(taken: Iterable[str]) -> int:
    """Return the number after the largest among some words."""
    return max((int(word) for word in taken if word.isdecimal()), default=0) + 1


def assignments(suite: LoadedSuite) -> list[Assignment]:
    """Return the kernels that are to be written for a suite: one for each packet, which serves all of its overloads and forms."""
    names = dict.fromkeys(table().folder_of(op) for name in suite.cases if (op := table().get(name)) is not None)
    if not names:
        raise NothingToJudgeError(
            f"the operators of suite {suite.name!r} are neither ATen's nor those of --custom-ops-root; "
            "language models write kernels for these: see `opforge ls suites`"
        )
    found, taken = [], set[str]()
    for name in names:
        parts = tuple(part for part in _parts(name, suite) if part.op not in taken)
        taken |= {part.op for part in parts}
        if parts:
            found.append(Assignment(name, table().resolve(name), parts))
    return found


def _parts(name: str, suite: LoadedSuite) -> Iterable[Part]:
    for served in kernel_in(Path(name), name).serves:
        if cases := suite.cases.get(served.op):
            yield Part(served.op, served.required, cases)


def spread(cases: Sequence[Case], most: int) -> list[Case]:
    """Return some of the cases, from the shortest to the longest call, no call twice."""
    different = {call_text(case): case for case in cases}
    ordered = sorted(different.values(), key=lambda case: (len(case.args), case.args))
    if len(ordered) <= most:
        return ordered
    step = (len(ordered) - 1) / (most - 1) if most > 1 else 0
    return [ordered[round(number * step)] for number in range(most)]


def call_text(case: Case) -> str:
    """Return a case's call as text."""
    return without_places(case.args)


def without_places(call: str) -> str:
    """Return the text of a call without the places of its contents, and of bounded length."""
    text = _STORED.sub("", call)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
