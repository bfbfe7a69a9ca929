"""What a suite is to the rest of the house."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from opforge.cases import Case
from opforge.suites.choosing import Choice

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

Make = Callable[[Mapping[str, Path], Path, str, Progress], dict[str, list[Case]]]
"""Runs users' files that make inputs, by operator, in the sandbox; the bytes of their tensors go into a blob with a name."""

DEFAULT_DTYPES = ("f32", "bf16", "i64", "b8", "c64")


def silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What a user may ask of any suite."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    ops: frozenset[str] | None = None
    """Full names of the operators wanted; None for all."""
    custom_ops_root: Path = Path("custom_ops")
    make: Make | None = None
    folder: Path | None = None
    """Where a suite keeps what it makes for one run; what a run that was broken off has made is there already."""
    choice: Choice = field(default_factory=Choice)
    """Among cases that have weights."""


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite's cases by operator, and what was left out."""

    name: str
    cases: Mapping[str, list[Case]]
    blobs: Mapping[str, Path] = field(default_factory=dict)
    """Stored tensors, by the name that a case's id begins with; empty when all contents are seeded."""
    losses: tuple[str, ...] = ()
    """What could not become a case, in words."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Files of the user's, besides the kernels, on which verdicts rest, with their digests."""

    @property
    def count(self) -> int:
        return sum(len(cases) for cases in self.cases.values())

    @property
    def digest(self) -> str:
        """Return a digest of all calls with their contents, in any order: runs on the same suite can be held against each other."""
        lines = sorted(f"{op}|{case.id}\n" for op, cases in self.cases.items() for case in cases)
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


class Suite(Protocol):
    """A source of cases."""

    name: str

    def load(self, options: SuiteOptions, progress: Progress = silent) -> LoadedSuite:
        """Return the cases, making them first if that has not been done."""
        ...


class NamesItsOperators(Protocol):
    """A suite of operators that are not ATen's: it knows itself what the names that a user types mean."""

    def operators(self, options: SuiteOptions, names: Iterable[str]) -> list[str]:
        """Return the full names of the operators; raises UnknownNameError."""
        ...
