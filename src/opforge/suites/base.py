"""What a suite is to the rest of the house."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from opforge.cases import Case

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

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


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite's cases by operator, and what was left out."""

    name: str
    cases: Mapping[str, list[Case]]
    blobs: Mapping[str, Path] = field(default_factory=dict)
    """Stored tensors, by the name that a case's id begins with; empty when all contents are seeded."""
    losses: tuple[str, ...] = ()
    """What could not become a case, in words."""

    @property
    def count(self) -> int:
        return sum(len(cases) for cases in self.cases.values())


class Suite(Protocol):
    """A source of cases."""

    name: str

    def load(self, options: SuiteOptions, progress: Progress = silent) -> LoadedSuite:
        """Return the cases, making them first if that has not been done."""
        ...
