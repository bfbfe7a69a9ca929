"""The executor interface: judge the jobs of a plan, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opforge.runs.config import RunConfig
from opforge.runs.manifest import Activity, Manifest
from opforge.runs.plan import Job, Plan
from opforge.runs.rows import ResultRow
from opforge.sandbox.host.client import ForkServerHandle
from opforge.suites.base import Progress

Emit = Callable[[list[ResultRow]], None]
"""Receives verdict lines as they arrive."""


@dataclass(frozen=True, slots=True)
class Work:
    """The input of an executor."""

    plan: Plan
    jobs: list[Job]
    """The plan's jobs that are left to do."""
    emit: Emit
    folder: Path
    """The run's folder; no kernel may see it."""
    manifest: Manifest
    """Includes the probed confinement and the measured peaks."""
    progress: Progress
    judging: Callable[[str], None]
    """Called now and then with the names of the operators being judged."""


class Executor(Protocol):
    """Judges kernels somewhere; the verdicts do not depend on where."""

    default_workers: int
    """Number of kernels judged at once by default."""
    most_workers: int

    def __init__(self, config: RunConfig, server: ForkServerHandle) -> None: ...

    def device_name(self) -> str:
        """Return the name of the requested device; raises if it is not available."""
        ...

    def overridden_by_torch(self) -> tuple[str, ...]:
        """Return the operators that torch itself overrides from Python on the device."""
        ...

    def confinement(self) -> dict[str, Any]:
        """Return the protections that hold where the kernels run."""
        ...

    def peaks(self) -> dict[str, Any]:
        """Return the measured peaks of the device."""
        ...

    def execute(self, work: Work) -> Activity | None:
        """Judge all jobs; every case gets exactly one verdict. Return how the time was spent, if that is known."""
        ...

    def close(self) -> None:
        """Stop everything that was started, even in the middle of the work."""
        ...
