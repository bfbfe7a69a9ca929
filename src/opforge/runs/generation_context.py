"""The context of a backend that makes its kernels during a run: cases, judge, and run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from opforge.backends import Backend
from opforge.runs.config import RunConfig
from opforge.runs.manifest import Manifest
from opforge.suites import LoadedSuite
from opforge.suites.base import Notice, Progress

if TYPE_CHECKING:
    from opforge.runs.execute.service import JudgingService


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """The context in which kernels are made."""

    config: RunConfig
    suite: LoadedSuite
    folder: Path
    """The run's folder; it holds the kernels made before an interruption."""
    manifest: Manifest
    judge_service: JudgingService
    progress: Progress
    notice: Notice
    drop_verdicts: Callable[[], None]
    """Drops the final verdicts, for a backend that continues a finished run."""


@runtime_checkable
class KernelGenerator(Backend, Protocol):
    """A backend that makes its kernels once the suite's cases are known.

    It makes them before it is asked for its kernels.
    """

    def make(self, context: GenerationContext) -> None:
        """Make the kernels; after this returns they are judged once more, like any backend's."""
        ...
