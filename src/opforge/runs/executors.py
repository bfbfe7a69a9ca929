"""What an executor is to the rest of the house: it judges the jobs of a plan, on this machine or on many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opforge.runs.config import RunConfig
from opforge.runs.plan import Job, Plan
from opforge.sandbox.client import ForkServer
from opforge.suites.base import Progress

Emit = Callable[[list[dict[str, Any]]], None]
"""Takes the lines of verdicts as they come."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an executor is given to do."""

    plan: Plan
    jobs: list[Job]
    """What is left of the plan's."""
    emit: Emit
    folder: Path
    """The run's, which no kernel may see."""
    manifest: dict[str, Any]
    """With what was found out of confinement and peaks."""
    progress: Progress
    judging: Callable[[str], None]
    """Told now and then which operators are being judged."""


class Executor(Protocol):
    """Where kernels are judged. Whatever it is, the verdicts are the same."""

    default_workers: int
    """How many kernels are judged at once unless a user says so."""
    most_workers: int

    def __init__(self, config: RunConfig, server: ForkServer) -> None: ...

    def device_name(self) -> str:
        """Return the name of the device that the run asks for; raises an error when it is not there."""
        ...

    def confinement(self) -> dict[str, Any]:
        """Return what kernels are kept from, where they are run."""
        ...

    def peaks(self) -> dict[str, Any]:
        """Return the measured peaks of the device."""
        ...

    def execute(self, work: Work) -> None:
        """Judge all jobs; every case gets its verdict, once."""
        ...

    def close(self) -> None:
        """End what was started, also in the middle of the work."""
        ...
