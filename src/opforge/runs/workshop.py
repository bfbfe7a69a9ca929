"""What a backend gets that makes its kernels during a run: the cases, a judge, and the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from opforge.backends import Backend
from opforge.runs.config import RunConfig
from opforge.suites import LoadedSuite
from opforge.suites.base import Progress

if TYPE_CHECKING:
    from opforge.runs.service import JudgingService


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where kernels are made."""

    config: RunConfig
    suite: LoadedSuite
    folder: Path
    """The run's folder; what was made before the run was broken off is there."""
    manifest: Mapping[str, Any]
    judging: JudgingService
    progress: Progress
    reopen: Callable[[], None]
    """Takes back what was judged at the end of the run, for a backend that goes on with one that had come to its end."""


@runtime_checkable
class MakesKernels(Backend, Protocol):
    """A backend that makes its kernels once the suite's cases are known, before it is asked for them."""

    def make(self, workshop: Workshop) -> None:
        """Make the kernels; they are judged once more, as those of any backend, when this returns."""
        ...
