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
from opforge.judge.roofline.peaks import load_or_measure
from opforge.kernels.native.builder import unconfined
from opforge.procs.channel import ChannelClosedError
from opforge.runs.config import RunConfig
from opforge.runs.execute.build_native import with_libraries
from opforge.runs.execute.judge_pool import ROLES, JudgePool, device_settings
from opforge.runs.execute.ray.connect import check_same_versions, versions
from opforge.runs.execute.ray.shipment import Shipment, UnpackedJob, fetch_blob, unpack
from opforge.runs.executors import Emit
from opforge.runs.plan import Plan
from opforge.runs.rows import ResultRow
from opforge.sandbox.guard.confined_command import confined_command
from opforge.sandbox.host import system_check
from opforge.sandbox.host.client import ForkServerProcess
from opforge.suites import LoadedSuite
from opforge.suites.base import no_progress

_SEND_INTERVAL_S = 0.1
"""Time for which verdicts are collected before they are sent together."""
_VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def _ignore_rows(_rows: list[ResultRow]) -> None:
    """Ignore the verdicts."""


class ForkServerLostError(Exception):
    """The fork server of this worker has gone; another worker can do the task."""


class NoForkServerError(Exception):
    """No fork server could be started here. No kernel has run, so none is to blame."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
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
        self._kept: tuple[Any, JudgePool] | None = None
        self.emit: Emit = _ignore_rows
        """Receives the verdicts of the current task."""

    def executor(self, config: RunConfig, blobs: Mapping[str, Path], folder: str, *, timed: bool) -> JudgePool:
        """Return the executor here.

        Its judge lives on from task to task, as from job to job on a single machine.
        """
        key = (config, blobs, folder, timed)
        if self._kept is None or self._kept[0] != key:
            if self._kept is not None:
                self._kept[1].close()
            confine = {"run": folder, "held": not self.confinement["missing"]} if config.confine else None
            peaks = self.peaks if timed else None
            executor = JudgePool(config, self.server, self._emit_rows, confine, peaks, keep_judges=True)
            self._kept = (key, executor)
        return self._kept[1]

    def _emit_rows(self, rows: list[ResultRow]) -> None:
        self.emit(rows)

    def serves(self, device: str) -> bool:
        return self.device == device and self.visible == os.environ.get(_VISIBLE_GPUS_VARIABLE)

    @property
    def confinement(self) -> dict[str, Any]:
        if self._confinement is None:
            self._confinement = system_check.working_protections(self.server.spawner)
        return self._confinement

    @property
    def peaks(self) -> dict[str, Any]:
        if self._peaks is None:
            self._peaks = load_or_measure(self.server.spawner, self.device).as_json()
        return self._peaks


_state: _WorkerState | None = None


def _worker_state(device: str) -> _WorkerState:
    """Return the fork server of this process; it is replaced when the task's GPU changes."""
    global _state  # noqa: PLW0603  # a Ray worker has no other place that outlives a task
    if _state is not None and not _state.serves(device):
        _end_server()
    if _state is None:
        _state = _WorkerState(device)
    return _state


def _end_server() -> None:
    global _state
    if _state is not None:
        here, _state = _state, None
        here.server.close()


atexit.register(_end_server)


def describe_node(settings: TaskSettings, *, confine: bool, timed: bool) -> dict[str, Any]:
    """Describe this node: its device's name, torch's own overrides, confinement and peaks, the last two on request."""
    check_same_versions(settings.versions, versions(), _location()["node"])
    here = _worker_state(settings.config.device)
    return {
        "name": system_check.check_device(here.server.spawner, settings.config.device),
        "overridden_by_torch": system_check.overridden_by_torch(here.server.spawner, settings.config.device),
        "confinement": here.confinement if confine else None,
        "peaks": here.peaks if timed else None,
    }


def judge_shipment(settings: TaskSettings, shipment: Shipment, *, timed: bool) -> Iterator[dict[str, Any]]:
    """Yield this task's location, then the verdicts as they come, then the end time."""
    yield {"began": time.time(), **_location()}
    check_same_versions(settings.versions, versions(), _location()["node"])
    rows: queue.SimpleQueue[list[ResultRow] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            _execute(settings, shipped, rows.put, timed=timed)
            rows.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again in the task's own thread
            rows.put(error)

    shipped = unpack(shipment)
    threading.Thread(target=work, daemon=True).start()
    done = False
    while not done:
        gathered, done = _next_rows(rows)
        yield {"rows": shipped.wire_rows(gathered)} | ({"ended": time.time()} if done else {})


def _next_rows(rows: queue.SimpleQueue[Any]) -> tuple[list[ResultRow], bool]:
    """Return the verdicts that arrive together, and whether they are the last."""
    gathered: list[ResultRow] = []
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


def _execute(settings: TaskSettings, shipped: UnpackedJob, emit: Emit, *, timed: bool) -> None:
    config = replace(settings.config, workers=1)
    blobs = {name: _blob(digest, pieces) for name, (digest, pieces) in settings.blobs.items()}
    within = confined_command if config.confine else unconfined
    (job,) = with_libraries([shipped.job], 1, no_progress, within)
    here = _worker_state(config.device)
    try:
        _ = here.server.spawner  # waits until it has started
    except InternalError as error:
        _end_server()
        raise NoForkServerError(str(error)) from error
    try:
        here.emit = emit
        executor = here.executor(config, blobs, settings.folder, timed=timed)
        executor.execute(Plan(LoadedSuite("", {}, blobs), (job,), ()), [job])
    except (ChannelClosedError, TimeoutError, InternalError) as error:
        _end_server()
        raise ForkServerLostError(f"the fork server died: {error}") from error


def _blob(digest: str, pieces: list[Any]) -> Path:
    import ray

    return fetch_blob(digest, [lambda piece=piece: ray.get(piece) for piece in pieces])  # type: ignore[misc]


def _location() -> dict[str, Any]:
    """Return this process's location, for the record of tasks."""
    import ray

    context = ray.get_runtime_context()
    return {
        "node": context.get_node_id(),
        "pid": os.getpid(),
        "gpus": context.get_accelerator_ids().get("GPU", []),
    }
