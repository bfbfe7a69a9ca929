"""The interface of a suite, its options and its result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from opforge.cases import Case
from opforge.suites.case_selection import CaseSelection

Progress = Callable[[str, int, int], None]
"""Callback: label of the current step, steps done, steps in total."""

Notice = Callable[[str], None]
"""Callback: one line about an event that the user wants to see, such as an attempt of a language model."""

MakeCases = Callable[[Mapping[str, Path], Path, str, Progress], dict[str, list[Case]]]
"""Runs users' input generators in the sandbox and returns the cases by operator.

Arguments: generator files by operator, blob file for the tensors' bytes, blob name, progress.
"""

DEFAULT_DTYPES = ("f32", "bf16", "i64", "b8", "c64")


def no_progress(_label: str, _done: int, _total: int) -> None:
    """Show no progress."""


def no_notice(_line: str) -> None:
    """Show no line."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """Options that apply to any suite."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    ops: frozenset[str] | None = None
    """Full names of the selected operators; None for all."""
    custom_ops_root: Path = Path("custom_ops")
    make_cases: MakeCases | None = None
    folder: Path | None = None
    """Folder for the files made for one run; a resumed run finds its earlier files there."""
    selection: CaseSelection = field(default_factory=CaseSelection)
    """Selection among cases that have weights."""


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite's cases by operator, and reasons for the calls left out."""

    name: str
    cases: Mapping[str, list[Case]]
    blobs: Mapping[str, Path] = field(default_factory=dict)
    """Stored tensors, by the name in ``Case.blob``; empty when all contents are seeded."""
    losses: tuple[str, ...] = ()
    """Messages about calls that could not become cases."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """User files other than kernels that affect verdicts, with their digests."""

    @property
    def case_count(self) -> int:
        return sum(len(cases) for cases in self.cases.values())

    @property
    def digest(self) -> str:
        """Return an order-independent digest of all calls and their contents.

        Runs with the same digest can be compared.
        """
        lines = sorted(f"{op}|{case.id}\n" for op, cases in self.cases.items() for case in cases)
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


class Suite(Protocol):
    """A source of cases."""

    name: str

    def load(self, options: SuiteOptions, progress: Progress = no_progress) -> LoadedSuite:
        """Return the cases; generate them first if needed."""
        ...


class OperatorResolver(Protocol):
    """A suite of non-ATen operators, which resolves the names typed by the user itself."""

    def operators(self, options: SuiteOptions, names: Iterable[str]) -> list[str]:
        """Return the full names of the operators; raises UnknownNameError."""
        ...
