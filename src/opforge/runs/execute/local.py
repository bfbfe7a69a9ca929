"""The default executor: this machine."""

from __future__ import annotations

import os
from typing import Any

from opforge.judge.roofline.peaks import load_or_measure
from opforge.kernels.native.builder import unconfined
from opforge.runs.config import RunConfig
from opforge.runs.execute.build_native import with_libraries
from opforge.runs.execute.judge_pool import JudgePool, confinement_settings
from opforge.runs.executors import Work
from opforge.runs.manifest import Activity
from opforge.sandbox.guard.confined_command import confined_command
from opforge.sandbox.host import system_check
from opforge.sandbox.host.client import ForkServerHandle


def same_kind_gpus(names: list[str], visible: str | None) -> list[str]:
    """Return the GPUs of the same kind as the first, if there are several: a run uses one kind."""
    gpu_ids = [gpu_id.strip() for gpu_id in visible.split(",")] if visible else list(map(str, range(len(names))))
    matching = [gpu_ids[number] for number, name in enumerate(names) if name == names[0]]
    return matching if len(matching) > 1 else []


class ThisMachine:
    """The local machine: its cores and its GPUs."""

    default_workers = 2
    most_workers = 256

    def __init__(self, config: RunConfig, server: ForkServerHandle) -> None:
        self._config = config
        self._server = server

    def device_name(self) -> str:
        return system_check.check_device(self._server.spawner, self._config.device)

    def overridden_by_torch(self) -> tuple[str, ...]:
        return system_check.overridden_by_torch(self._server.spawner, self._config.device)

    def confinement(self) -> dict[str, Any]:
        return system_check.working_protections(self._server.spawner)

    def peaks(self) -> dict[str, Any]:
        return load_or_measure(self._server.spawner, self._config.device).as_json()

    def execute(self, work: Work) -> Activity:
        """Build native kernels, then judge."""
        config = self._config
        jobs = with_libraries(
            work.jobs, config.workers, work.progress, confined_command if config.confine else unconfined
        )
        confine = confinement_settings(config, work.folder, work.manifest)
        peaks, gpus = work.manifest.peaks, self._gpus()
        pool = JudgePool(config, self._server, work.emit, confine, peaks, gpus=gpus)
        pool.execute(work.plan, jobs, work.judging)
        return pool.activity

    def _gpus(self) -> list[str]:
        """Return the GPUs to share out, as in CUDA_VISIBLE_DEVICES; none if there is no choice."""
        if self._config.device != "cuda":
            return []
        return same_kind_gpus(system_check.gpu_names(self._server.spawner), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def close(self) -> None:
        """Do nothing: closing the server ends everything."""
