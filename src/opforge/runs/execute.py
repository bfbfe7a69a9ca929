"""The local executor: N judges, each with its own worker, fed from one queue of jobs, to which jobs may be added at any time.

What is timed is got ready by all judges at once, and then timed case by case while all others wait.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from opforge.cases import Case, Phase
from opforge.judge.verdict import Finding, Outcome
from opforge.processes import describe_status
from opforge.runs.config import RunConfig
from opforge.runs.plan import Job, Key, Part, Plan
from opforge.sandbox import warm
from opforge.sandbox.client import SERVER_VARIABLE, ForkServer, ForkServerProcess, Spawner
from opforge.sandbox.wire import Channel, ChannelClosedError
from opforge.suites import LoadedSuite

ROLES = {
    "worker": "opforge.sandbox.worker:serve",
    "judge": "opforge.judge.session:serve",
    "inputs": "opforge.judge.inputs:serve",
    "probe": "opforge.sandbox.probe:serve",
    "peaks": "opforge.judge.peaks:serve",
}
_BATCH = 96
_SLACK_S = 180.0
"""What a judge may take beyond its kernel's own time limit before it is held to hang in ATen."""

Emit = Callable[[list[dict[str, Any]]], None]


def nothing() -> None:
    """Do nothing."""


def _not_told(_ops: str) -> None:
    """Take no notice of what is being judged."""


def confined(config: RunConfig, folder: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Return what judges need to confine workers, which may not see a run's folder; None where they are not to."""
    held = not manifest["confinement"]["missing"]
    return {"run": str(folder.resolve()), "held": held} if config.confine else None


def start_server(device: str, roles: Mapping[str, str] = ROLES, *, confined: bool = True) -> ForkServer:
    """Return the warm server that OPFORGE_SERVER names, or a new one, which imports torch while the caller goes on.

    Kernels that are not confined get a server of their own: they could spoil a warm one for the runs after theirs.
    """
    settings = device_settings(device)
    if confined and (path := os.environ.get(SERVER_VARIABLE)) and (server := warm.connect(path, settings)) is not None:
        return server
    return ForkServerProcess(roles, settings)


def device_settings(device: str) -> dict[str, str]:
    """Return the variables that a fork server needs for a kind of device: without a GPU, Triton runs in its interpreter."""
    return {"TRITON_INTERPRET": "1"} if device == "cpu" else {}


@dataclass
class _Task:
    """A job on its way, with what is left of it and how large its batches are."""

    job: Job
    emit: Emit
    ended: Callable[[], None] = nothing
    """Called when all of it has been judged."""
    racing: bool = False
    """Whether it is timed, and so must have the machine to itself in the end."""
    batch: int = _BATCH
    plain: frozenset[str] = frozenset()
    """Cases that are judged as they stand only: ATen itself was lost on one of their hostile forms."""
    suspect: _Task | None = None
    """For a task that has ATen run a case with no kernel attached: the task whose judge was lost on that case."""
    lost: str = ""
    """How that judge ended."""
    waiting: dict[Key, Case] = field(default_factory=dict)

    def start(self) -> None:
        """List what is waiting; not before it is needed, as there may be many tasks with the same cases."""
        self.waiting = {self.key(p.op, c.id, c.phase): c for p in self.job.parts for c in p.cases}

    def key(self, op: str, case_id: str, phase: str) -> Key:
        return (self.job.kernel.name, op, case_id, phase)

    def rest(self, batch: int, plain: frozenset[str]) -> _Task | None:
        parts = [
            Part(p.op, p.required, [c for c in p.cases if self.key(p.op, c.id, c.phase) in self.waiting])
            for p in self.job.parts
        ]
        job = replace(self.job, parts=tuple(p for p in parts if p.cases))
        return replace(self, job=job, batch=batch, plain=self.plain | plain, waiting={}) if job.parts else None

    @property
    def place(self) -> list[int]:
        """Return the number of the first case that waits among those of its operator, and how many those are."""
        part, number = self._first
        return [number, len(part.cases)]

    @property
    def _first(self) -> tuple[Part, int]:
        key = next(iter(self.waiting))
        found = ((p, i, self.key(p.op, c.id, c.phase)) for p in self.job.parts for i, c in enumerate(p.cases))
        return next((part, number) for part, number, one in found if one == key)

    def aten_alone(self, lost: str) -> _Task:
        """Return the task to have ATen run the case on which a judge was lost, in the same variants, with no kernel attached."""
        part, number = self._first
        job = replace(self.job, parts=(replace(part, cases=[part.cases[number]]),))
        return replace(self, job=job, suspect=self, lost=lost, ended=nothing, waiting={})


class _Turn(Enum):
    """How a judge stands that has something to time. All get it ready at once; then they time it one after the other, while all wait."""

    NONE = "gets something ready"
    READY = "waits for its turn"
    RACING = "times it"
    RACED = "waits for the others"


@dataclass
class _Lane:
    """A judge's process and what it is doing."""

    pid: int
    channel: Channel
    racing: bool = False
    turn: _Turn = _Turn.NONE
    task: _Task | None = None
    heard: float = 0.0
    gpu: str = ""
    """The only one that it sees, of several."""


_SAID = {"ready": _Turn.READY, "raced": _Turn.RACED}
"""What a judge says that waits to be told to go on."""


def heading(job: Job, case: Case) -> dict[str, Any]:
    """Return the fields with which the line of a verdict begins."""
    return {"op": case.op, "kernel": job.kernel.name, "case": case.args, "source": case.source}


def _without_inputs(job: Job, case: Case) -> dict[str, Any]:
    """Return the line of a case whose inputs could not be made: it is not the kernel's fault, and it is not right."""
    finding = Finding(Outcome.ERROR, f"its inputs could not be made: {case.lost}")
    return {**heading(job, case), "id": case.id, "phase": case.phase.value, **finding.row()}


class LocalExecutor:
    """Runs a plan's jobs on this machine."""

    def __init__(
        self,
        config: RunConfig,
        server: ForkServer,
        emit: Emit,
        confine: dict[str, Any] | None = None,
        peaks: dict[str, Any] | None = None,
        *,
        keep: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        """``keep`` lets the judges live on for what is executed next; ``close`` ends them then. ``gpus`` are those to be shared out, if several."""
        self._config = config
        self._keep = keep
        self._gpus = gpus or ("",)
        self._idle: list[_Lane] = []
        self._peaks = peaks
        self._confine = confine
        self._server = server
        self._emit = emit
        self._selector = selectors.DefaultSelector()
        self._lanes: list[_Lane] = []
        self._tasks: deque[_Task] = deque()
        self._races: deque[_Task] = deque()
        self._blobs: dict[str, str] = {}

    @property
    def _spawner(self) -> Spawner:
        return self._server.spawner

    def execute(self, plan: Plan, jobs: list[Job], judging: Callable[[str], None] = _not_told) -> None:
        """Judge all jobs; every case gets its verdict through ``emit``. What is timed comes last, one case at a time on a device.

        ``judging`` is told now and then which operators are being judged.
        """
        self.use(plan.suite)
        self._emit(
            [_without_inputs(job, case) for job in jobs for part in job.parts for case in part.cases if case.lost]
        )
        for phase in (Phase.CORRECTNESS, Phase.PERFORMANCE):
            for job in jobs:
                self.add(job, phase, self._emit)
            while self.busy:
                self.turn()
                if names := sorted(
                    {next(iter(lane.task.waiting))[1] for lane in self._lanes if lane.task and lane.task.waiting}
                ):
                    judging(", ".join(names))

    def use(self, suite: LoadedSuite) -> None:
        """Give the judges that are started from now on the stored tensors of a suite."""
        self._blobs = {name: str(path) for name, path in suite.blobs.items()}

    def add(self, job: Job, phase: Phase, emit: Emit, ended: Callable[[], None] = nothing) -> None:
        """Put what a job has of one phase on the queue; races are run before what waits, when what is being judged has ended."""
        task = _Task(job.of(phase), emit, ended, racing=phase is Phase.PERFORMANCE)
        if not task.job.parts:
            ended()
            return
        self._queue(racing=task.racing).append(task)

    def listen(self, source: socket.socket, heard: Callable[[], None]) -> None:
        """Have a turn end when something else is to be heard."""
        self._selector.register(source, selectors.EVENT_READ, heard)

    @property
    def busy(self) -> bool:
        """Whether anything is being judged, or waits for it."""
        return bool(self._lanes or self._races or self._tasks)

    @property
    def at_work(self) -> int:
        """How many judges there are now."""
        return len(self._lanes)

    def turn(self, timeout_s: float = 1.0) -> None:
        """Start judges for what waits, and hear what those at work have to say."""
        self._staff()
        self._call_up()
        for key, _events in self._selector.select(timeout=timeout_s):
            if isinstance(key.data, _Lane):
                self._hear(key.data)
            else:
                key.data()
        self._end_hung()

    def stop(self) -> None:
        """End all judges, whatever they are at."""
        for lane in list(self._lanes):
            self._forget(lane)
            self._spawner.stop(lane.pid)
        self.close()

    def close(self) -> None:
        """End the judges that were kept."""
        while self._idle:
            lane = self._idle.pop()
            lane.channel.close()
            self._spawner.stop(lane.pid)

    def _queue(self, *, racing: bool) -> deque[_Task]:
        return self._races if racing else self._tasks

    def _staff(self) -> None:
        """Have as many judges as there may be. What is timed waits for all else to end."""
        racing = bool(self._races)
        if any(lane.racing is not racing or lane.turn is _Turn.RACING for lane in self._lanes):
            return
        most = max(self._config.workers, len(self._gpus))
        while self._queue(racing=racing) and len(self._lanes) < most:
            self._next(self._lane(racing=racing))

    def _call_up(self) -> None:
        """When all judges have got ready what is to be timed, let one on each device time it; when all have, let them go on."""
        if any(lane.turn is _Turn.NONE for lane in self._lanes):
            return
        busy = {lane.gpu for lane in self._lanes if lane.turn is _Turn.RACING}
        for lane in [lane for lane in self._lanes if lane.turn is _Turn.READY]:
            if lane.gpu not in busy:
                busy.add(lane.gpu)
                self._tell(lane, _Turn.RACING)
        if not busy:
            for lane in list(self._lanes):
                self._tell(lane, _Turn.NONE)

    def _tell(self, lane: _Lane, turn: _Turn) -> None:
        """Let a judge that waits go on."""
        lane.turn, lane.heard = turn, time.monotonic()
        try:
            lane.channel.send({"go": True})
        except ChannelClosedError:
            self._lost(lane, "")

    def _lane(self, *, racing: bool) -> _Lane:
        """Return a judge that sees the GPU with the fewest others on it: one that was kept, or a new one."""
        gpu = min(self._gpus, key=[lane.gpu for lane in self._lanes].count)
        kept = next((lane for lane in self._idle if lane.gpu == gpu), None)
        if kept is None:
            lane = self._started(gpu)
        else:
            self._idle.remove(kept)
            lane = kept
        lane.racing = racing
        self._lanes.append(lane)
        self._selector.register(lane.channel, selectors.EVENT_READ, lane)
        return lane

    def _started(self, gpu: str) -> _Lane:
        ours, theirs = Channel.pair()
        line = self._spawner.connect(gpu)
        settings = {
            "device": self._config.device,
            "timeout_s": self._config.timeout_s,
            "memory_bytes": self._config.memory_bytes,
            "blobs": self._blobs,
            "confine": self._confine,
            "peaks": self._peaks,
            "gpu": gpu,
        }
        pid = self._spawner.spawn("judge", settings, [theirs.fileno(), line.fileno()], limits={}, output=False)
        theirs.close()
        line.close()
        return _Lane(pid, ours, gpu=gpu)

    def _next(self, lane: _Lane) -> None:
        """Give a judge something to do, if there is something of its kind; what is timed waits for the others to end."""
        queue = self._queue(racing=lane.racing)
        if not queue or (self._races and not lane.racing):
            self._rest(lane)
            return
        lane.task = queue.popleft()
        lane.task.start()
        lane.heard = time.monotonic()
        parts = [part.wire() for part in lane.task.job.parts]
        try:
            job = lane.task.job
            lane.channel.send({
                "kernel": job.kernel.wire(), "ops": parts, "batch": lane.task.batch, "until": job.until,
                "plain": sorted(lane.task.plain), "allow_fallback": self._config.allow_fallback, "serves": list(job.serves),
                "aten_alone": lane.task.suspect.place if lane.task.suspect is not None else None,
            })  # fmt: skip
        except ChannelClosedError:
            self._lost(lane, "")

    def _hear(self, lane: _Lane) -> None:
        try:
            message = lane.channel.receive(_SLACK_S)
        except (ChannelClosedError, TimeoutError):
            self._lost(lane, "")
            return
        lane.heard = time.monotonic()
        if turn := next((turn for word, turn in _SAID.items() if word in message), None):
            lane.turn = turn
            return
        if "done" in message:
            task = lane.task
            if task is not None and task.suspect is not None:
                self._convict(task.suspect, task.lost)
            self._next(lane)
            if task is not None:
                task.ended()
            return
        if lane.task is not None:
            self._record(lane.task, message["op"], message["verdicts"])

    def _record(self, task: _Task, op: str, verdicts: list[dict[str, Any]]) -> None:
        rows = []
        for verdict in verdicts:
            case = task.waiting.pop(task.key(op, verdict["id"], verdict["phase"]), None)
            if case is not None:
                rows.append({**heading(task.job, case), **verdict})
        task.emit(rows)

    def _end_hung(self) -> None:
        now = time.monotonic()
        for lane in list(self._lanes):
            waits = lane.turn in _SAID.values()
            if lane.task and not waits and now - lane.heard > self._config.timeout_s * (lane.task.batch + 1) + _SLACK_S:
                self._lost(lane, "hung")

    def _lost(self, lane: _Lane, how: str) -> None:
        """A judge has gone. Go on case by case; on the case that does it, have ATen run alone, to see whose fault it is."""
        status = self._spawner.stop(lane.pid).status
        self._forget(lane)
        task = lane.task
        if task is None:
            return
        ended = how or describe_status(status)
        if task.suspect is not None:
            self._acquit(task.suspect, ended)
        elif task.waiting and task.batch == 1:
            self._queue(racing=task.racing).appendleft(task.aten_alone(ended))
        else:
            self._go_on(task)

    def _acquit(self, task: _Task, ended: str) -> None:
        """ATen alone does not come through a case: it is judged without hostile variants, or not at all where ATen dies of it as it stands."""
        _kernel, op, case_id, phase = next(iter(task.waiting))
        if case_id not in task.plain:
            self._go_on(task, frozenset({case_id}))
            return
        reason = f"ATen itself {ended} on this case (the judge's process was lost, not the kernel's)"
        self._record(task, op, [{"id": case_id, "phase": phase, **Finding(Outcome.ERROR, reason).row()}])
        self._go_on(task)

    def _convict(self, task: _Task, ended: str) -> None:
        """ATen alone comes through the case on which a judge was lost: that was the kernel's doing, and no more of it is run."""
        reason = f"the judge's process {ended} while it judged this kernel; with ATen alone it does not"
        row = Finding(Outcome.CRASHED, reason).row()
        for _kernel, op, case_id, phase in list(task.waiting):
            self._record(task, op, [{"id": case_id, "phase": phase, **row}])
        task.ended()

    def _go_on(self, task: _Task, plain: frozenset[str] = frozenset()) -> None:
        """Judge what is left of a task one case at a time."""
        if (rest := task.rest(1, plain)) is not None:
            self._queue(racing=task.racing).appendleft(rest)
        else:
            task.ended()

    def _rest(self, lane: _Lane) -> None:
        """A judge has nothing more to do."""
        lane.task = None
        self._selector.unregister(lane.channel)
        self._lanes.remove(lane)
        self._idle.append(lane)
        if not self._keep:
            self.close()

    def _forget(self, lane: _Lane) -> None:
        self._lanes.remove(lane)
        self._selector.unregister(lane.channel)
        lane.channel.close()
