"""Code that runs in a Ray worker: a fork server, judge and sandbox, as on a single machine.

No kernel code runs in the Ray worker itself.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opforge.errors import InternalError
from opforge.judge.peaks import known_peaks
from opforge.kernels.native.building import unconfined
from opforge.runs.cluster.joining import same_versions, versions
from opforge.runs.cluster.parcels import Parcel, Unpacked, stored, unpacked
from opforge.runs.config import RunConfig
from opforge.runs.execute import ROLES, LocalExecutor, device_settings
from opforge.runs.executors import Emit
from opforge.runs.native import with_libraries
from opforge.runs.plan import Plan
from opforge.sandbox import probe
from opforge.sandbox.client import ForkServerProcess
from opforge.sandbox.confined import words_before
from opforge.sandbox.wire import ChannelClosedError
from opforge.suites import LoadedSuite
from opforge.suites.base import silent

_SEND_INTERVAL_S = 0.1
"""Time for which verdicts are collected before they are sent together."""
_VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def _ignore_rows(_rows: list[dict[str, Any]]) -> None:
    """Ignore the verdicts."""


class LostError(Exception):
    """The fork server of this worker has gone; another worker can do the task."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings shared by all tasks of a run."""

    config: RunConfig
    versions: Mapping[str, str | None]
    folder: str
    """The run's folder, on the machine that stores it."""
    blobs: Mapping[str, tuple[str, list[Any]]] = field(default_factory=dict)
    """The digest of each blob, and its pieces in the object store."""


class _WorkerState:
    """The fork server of this Ray worker, and the data probed on this machine."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.visible = os.environ.get(_VISIBLE_GPUS_VARIABLE)
        self.server = ForkServerProcess(ROLES, device_settings(device))  # a warm one belongs to another machine
        self._confinement: dict[str, Any] | None = None
        self._peaks: dict[str, Any] | None = None
        self._kept: tuple[Any, LocalExecutor] | None = None
        self.emit: Emit = _ignore_rows
        """Receives the verdicts of the current task."""

    def executor(self, config: RunConfig, blobs: Mapping[str, Path], folder: str, *, timed: bool) -> LocalExecutor:
        """Return the executor here.

        Its judge lives on from task to task, as from job to job on a single machine.
        """
        key = (config, blobs, folder, timed)
        if self._kept is None or self._kept[0] != key:
            if self._kept is not None:
                self._kept[1].close()
            confine = {"run": folder, "held": not self.confinement["missing"]} if config.confine else None
            peaks = self.peaks if timed else None
            executor = LocalExecutor(config, self.server, self._hear, confine, peaks, keep=True)
            self._kept = (key, executor)
        return self._kept[1]

    def _hear(self, rows: list[dict[str, Any]]) -> None:
        self.emit(rows)

    def serves(self, device: str) -> bool:
        return self.device == device and self.visible == os.environ.get(_VISIBLE_GPUS_VARIABLE)

    @property
    def confinement(self) -> dict[str, Any]:
        if self._confinement is None:
            self._confinement = probe.confinement(self.server.spawner)
        return self._confinement

    @property
    def peaks(self) -> dict[str, Any]:
        if self._peaks is None:
            self._peaks = known_peaks(self.server.spawner, self.device).as_json()
        return self._peaks


_here: _WorkerState | None = None


def _server(device: str) -> _WorkerState:
    """Return the fork server of this process; it is replaced when the task's GPU changes."""
    global _here  # noqa: PLW0603  # a Ray worker has no other place that outlives a task
    if _here is not None and not _here.serves(device):
        _end_server()
    if _here is None:
        _here = _WorkerState(device)
    return _here


def _end_server() -> None:
    global _here
    if _here is not None:
        here, _here = _here, None
        here.server.close()


atexit.register(_end_server)


def look(settings: Settings, *, confine: bool, timed: bool) -> dict[str, Any]:
    """Describe this node: its device's name, confinement, and peaks, the last two on request."""
    same_versions(settings.versions, versions(), _place()["node"])
    here = _server(settings.config.device)
    return {
        "name": probe.check_device(here.server.spawner, settings.config.device),
        "confinement": here.confinement if confine else None,
        "peaks": here.peaks if timed else None,
    }


def judge(settings: Settings, parcel: Parcel, *, timed: bool) -> Iterator[dict[str, Any]]:
    """Yield this task's location, then the verdicts as they come, then the end time."""
    yield {"began": time.time(), **_place()}
    same_versions(settings.versions, versions(), _place()["node"])
    rows: queue.SimpleQueue[list[dict[str, Any]] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            _execute(settings, shipped, rows.put, timed=timed)
            rows.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again in the task's own thread
            rows.put(error)

    shipped = unpacked(parcel)
    threading.Thread(target=work, daemon=True).start()
    done = False
    while not done:
        gathered, done = _next_rows(rows)
        yield {"rows": shipped.told(gathered)} | ({"ended": time.time()} if done else {})


def _next_rows(rows: queue.SimpleQueue[Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the verdicts that arrive together, and whether they are the last."""
    gathered: list[dict[str, Any]] = []
    deadline = None
    while True:
        try:
            item = rows.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return gathered, False
        if item is None:
            return gathered, True
        if isinstance(item, BaseException):
            raise item
        gathered += item
        deadline = deadline or time.monotonic() + _SEND_INTERVAL_S


def _execute(settings: Settings, shipped: Unpacked, emit: Emit, *, timed: bool) -> None:
    config = replace(settings.config, workers=1)
    blobs = {name: _blob(digest, pieces) for name, (digest, pieces) in settings.blobs.items()}
    within = words_before if config.confine else unconfined
    (job,) = with_libraries([shipped.job], 1, silent, within)
    try:
        here = _server(config.device)
        here.emit = emit
        executor = here.executor(config, blobs, settings.folder, timed=timed)
        executor.execute(Plan(LoadedSuite("", {}, blobs), (job,), ()), [job])
    except (ChannelClosedError, TimeoutError, InternalError) as error:
        _end_server()
        raise LostError(f"the fork server was lost: {error}") from error


def _blob(digest: str, pieces: list[Any]) -> Path:
    import ray

    return stored(digest, [lambda piece=piece: ray.get(piece) for piece in pieces])  # type: ignore[misc]


def _place() -> dict[str, Any]:
    """Return this process's location, for the record of tasks."""
    import ray

    context = ray.get_runtime_context()
    return {
        "node": context.get_node_id(),
        "pid": os.getpid(),
        "gpus": context.get_accelerator_ids().get("GPU", []),
    }
