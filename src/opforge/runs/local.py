"""The executor for this machine, which is the default."""

from __future__ import annotations

from typing import Any

from opforge.judge.peaks import known_peaks
from opforge.kernels.native.building import unconfined
from opforge.runs.config import RunConfig
from opforge.runs.execute import LocalExecutor
from opforge.runs.executors import Work
from opforge.runs.native import with_libraries
from opforge.sandbox import probe
from opforge.sandbox.client import ForkServerProcess
from opforge.sandbox.confined import words_before


class ThisMachine:
    """The machine that one sits at: its cores and its GPUs."""

    default_workers = 2
    most_workers = 256

    def __init__(self, config: RunConfig, server: ForkServerProcess) -> None:
        self._config = config
        self._server = server

    def device_name(self) -> str:
        return probe.check_device(self._server.spawner, self._config.device)

    def confinement(self) -> dict[str, Any]:
        return probe.confinement(self._server.spawner)

    def peaks(self) -> dict[str, Any]:
        return known_peaks(self._server.spawner, self._config.device).as_json()

    def execute(self, work: Work) -> None:
        """Build what must be built, then judge."""
        config = self._config
        jobs = with_libraries(work.jobs, config.workers, work.progress, words_before if config.confine else unconfined)
        held = not work.manifest["confinement"]["missing"]
        confine = {"run": str(work.folder.resolve()), "held": held} if config.confine else None
        LocalExecutor(config, self._server, work.emit, confine, work.manifest.get("peaks")).execute(work.plan, jobs)

    def close(self) -> None:
        """There is nothing that the server does not end."""
