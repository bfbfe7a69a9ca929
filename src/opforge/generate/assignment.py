"""What a model is to write: a kernel for a packet of operators, and what it will be judged on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opforge.backends.directory import kernel_in
from opforge.cases import Case, Phase
from opforge.errors import NothingToJudgeError
from opforge.ops import Operator, table
from opforge.runs.plan import Job, Part
from opforge.suites import LoadedSuite

_STORED = re.compile(r", (?:at|nbytes)=\d+")
"""Where the contents of a tensor are stored, which says nothing about the call."""
_LONGEST = 240


@dataclass(frozen=True, slots=True)
class Assignment:
    """A kernel that is to be written; its name is that of its folder in a kernel directory."""

    name: str
    primary: Operator
    parts: tuple[Part, ...]

    @property
    def entry(self) -> str:
        return f"{self.primary.base}_kernel_impl"

    @property
    def races(self) -> bool:
        """Whether anything of it is timed."""
        return any(case.phase is Phase.PERFORMANCE for part in self.parts for case in part.cases)

    def job(self, file: Path, name: str) -> Job:
        """Return what has to be judged of the kernel in a file, under a name of its own."""
        kernel = kernel_in(file, self.name)
        parts = {part.op for part in self.parts}
        serves = tuple(served for served in kernel.serves if served.op in parts)
        return Job(replace(kernel, name=name, serves=serves), self.parts)


def assignments(suite: LoadedSuite) -> list[Assignment]:
    """Return the kernels that are to be written for a suite: one for each packet, which serves all of its overloads and forms."""
    names = dict.fromkeys(table().folder_of(op) for name in suite.cases if (op := table().get(name)) is not None)
    if not names:
        raise NothingToJudgeError(
            f"the operators of suite {suite.name!r} are not ATen's; language models write kernels for ATen operators: see `opforge ls suites`"
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
