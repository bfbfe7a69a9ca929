"""Judge all honest kernels: as many runs as the operator with the most kernels has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opforge.cases import Case
from opforge.runs.rows import ResultRow
from tests.corpora import StoredCases, disjoint, judge
from tests.honest.cases import CALLS

KERNELS = Path(__file__).parent / "kernels"


@dataclass(frozen=True, slots=True)
class Honest:
    """A kernel that does its work, in its own way."""

    name: str
    op: str
    file: Path


def kernels() -> list[Honest]:
    """Return the corpus; the operator stands in each file."""
    found = []
    for file in sorted(KERNELS.rglob("*.py")):
        match = re.search(r'^OP = "(.+)"$', file.read_text(), re.MULTILINE)
        if match is None:
            raise ValueError(f'{file} does not say its operator in a line such as OP = "relu.default"')
        found.append(Honest(str(file.relative_to(KERNELS).with_suffix("")), match[1], file))
    return found


def write_cases(ops: Iterable[str], path: Path) -> dict[str, list[Case]]:
    """Store the cases of some operators, and return them."""
    stored = StoredCases(path)
    cases = {op: _distinct(stored.case(op, args, kwargs) for args, kwargs in CALLS[op]()) for op in ops}
    stored.close()
    return cases


def _distinct(cases: Iterable[Case]) -> list[Case]:
    return list({case.id: case for case in cases}.values())


def judge_all(chosen: Iterable[Honest], out: Path, **fields: Any) -> dict[str, list[ResultRow]]:
    """Return the lines of the results about each kernel, by its name."""
    chosen = list(chosen)
    out.mkdir(parents=True, exist_ok=True)
    blob = out / "cases.safetensors"
    cases = write_cases({k.op: None for k in chosen}, blob)
    found: dict[str, list[ResultRow]] = {}
    for number, group in enumerate(disjoint(chosen, lambda k: k.op)):
        some = {k.op: cases[k.op] for k in group}
        rows = judge({k.op: k.file for k in group}, some, out / f"run-{number}", blob=blob, **fields)
        for kernel in group:
            found[kernel.name] = [row for row in rows if row.op == kernel.op]
    return found


def false_alarm(kernel: Honest, row: ResultRow) -> bool:
    """Whether a verdict on an honest kernel is not deserved; a kernel in Triton may decline bfloat16."""
    declined = row.verdict == "unsupported" and "triton" in kernel.name
    return row.verdict != "passed" and not declined
