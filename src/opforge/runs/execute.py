"""Local executor: N judges, each with its own worker, fed from one queue of jobs.

Jobs may be added at any time. All judges prepare their timed cases in parallel, then time them one
at a time while the others wait.
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
"""Time beyond the kernel's own limit before a judge counts as hung in ATen."""

Emit = Callable[[list[dict[str, Any]]], None]


def nothing() -> None:
    """Do nothing."""


def _not_told(_ops: str) -> None:
    """Ignore the names of the operators being judged."""


def confined(config: RunConfig, folder: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Return the judges' settings for confining workers; None if confinement is off.

    Workers may not see the run's folder.
    """
    held = not manifest["confinement"]["missing"]
    return {"run": str(folder.resolve()), "held": held} if config.confine else None


def start_server(device: str, roles: Mapping[str, str] = ROLES, *, confined: bool = True) -> ForkServer:
    """Return the warm server that OPFORGE_SERVER names, or start a new one.

    A new one imports torch while the caller goes on. Unconfined kernels get their own server: they
    could corrupt a warm one for later runs.
    """
    settings = device_settings(device)
    if confined and (path := os.environ.get(SERVER_VARIABLE)) and (server := warm.connect(path, settings)) is not None:
        return server
    return ForkServerProcess(roles, settings)


def device_settings(device: str) -> dict[str, str]:
    """Return the fork server's variables for a device; without a GPU, Triton runs interpreted."""
    return {"TRITON_INTERPRET": "1"} if device == "cpu" else {}


@dataclass
class _Task:
    """A queued or running job: its remaining cases and its batch size."""

    job: Job
    emit: Emit
    ended: Callable[[], None] = nothing
    """Called when all its cases have been judged."""
    racing: bool = False
    """Whether it is timed, and so needs exclusive use of the machine in the end."""
    batch: int = _BATCH
    plain: frozenset[str] = frozenset()
    """Cases judged without hostile variants, because ATen itself crashed or hung on one of them."""
    suspect: _Task | None = None
    """On a task that runs a case with ATen alone: the task whose judge was lost on that case."""
    lost: str = ""
    """How that judge ended."""
    waiting: dict[Key, Case] = field(default_factory=dict)

    def start(self) -> None:
        """List the remaining cases; done late, as many tasks may share the same cases."""
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
        """Return the index of the first remaining case and the case count of its operator."""
        part, number = self._first
        return [number, len(part.cases)]

    @property
    def _first(self) -> tuple[Part, int]:
        key = next(iter(self.waiting))
        found = ((p, i, self.key(p.op, c.id, c.phase)) for p in self.job.parts for i, c in enumerate(p.cases))
        return next((part, number) for part, number, one in found if one == key)

    def aten_alone(self, lost: str) -> _Task:
        """Return a task that runs a lost judge's case with ATen alone, in the same variants."""
        part, number = self._first
        job = replace(self.job, parts=(replace(part, cases=[part.cases[number]]),))
        return replace(self, job=job, suspect=self, lost=lost, ended=nothing, waiting={})


class _Turn(Enum):
    """Timing state of a judge.

    All judges prepare at once. Then they time one after the other, while all others wait.
    """

    NONE = "gets something ready"
    READY = "waits for its turn"
    RACING = "times it"
    RACED = "waits for the others"


@dataclass
class _Lane:
    """A judge process and its current task."""

    pid: int
    channel: Channel
    racing: bool = False
    turn: _Turn = _Turn.NONE
    task: _Task | None = None
    heard: float = 0.0
    gpu: str = ""
    """The one GPU visible to it, if there are several."""


_SAID = {"ready": _Turn.READY, "raced": _Turn.RACED}
"""Messages after which a judge waits for permission to continue."""


def heading(job: Job, case: Case) -> dict[str, Any]:
    """Return the leading fields of a verdict's line."""
    return {"op": case.op, "kernel": job.kernel.name, "case": case.args, "source": case.source}


def _without_inputs(job: Job, case: Case) -> dict[str, Any]:
    """Return the line of a case whose inputs could not be made.

    It is not the kernel's fault, but the case is not correct either.
    """
    finding = Finding(Outcome.ERROR, f"its inputs could not be made: {case.lost}")
    return {**heading(job, case), "id": case.id, "phase": case.phase.value, **finding.row()}


class LocalExecutor:
    """Runs the jobs of a plan on this machine."""

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
        """Create an executor.

        ``keep`` keeps the judges alive for the next execution, until ``close``. ``gpus`` are the
        GPUs to share out, if there are several.
        """
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
        """Judge all jobs and emit a verdict for every case.

        Timed cases come last, one at a time per device. ``judging`` is called now and then with the
        names of the operators being judged.
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
        """Give judges started from now on the stored tensors of a suite."""
        self._blobs = {name: str(path) for name, path in suite.blobs.items()}

    def add(self, job: Job, phase: Phase, emit: Emit, ended: Callable[[], None] = nothing) -> None:
        """Queue the cases of one phase of a job.

        Races run before other queued tasks, once the running tasks have ended.
        """
        task = _Task(job.of(phase), emit, ended, racing=phase is Phase.PERFORMANCE)
        if not task.job.parts:
            ended()
            return
        self._queue(racing=task.racing).append(task)

    def listen(self, source: socket.socket, heard: Callable[[], None]) -> None:
        """Also watch a socket during each turn; ``heard`` is called when it is readable."""
        self._selector.register(source, selectors.EVENT_READ, heard)

    @property
    def busy(self) -> bool:
        """Whether anything is running or queued."""
        return bool(self._lanes or self._races or self._tasks)

    @property
    def at_work(self) -> int:
        """Number of running judges."""
        return len(self._lanes)

    def turn(self, timeout_s: float = 1.0) -> None:
        """Start judges for queued tasks and handle messages from running ones."""
        self._staff()
        self._call_up()
        for key, _events in self._selector.select(timeout=timeout_s):
            if isinstance(key.data, _Lane):
                self._hear(key.data)
            else:
                key.data()
        self._end_hung()

    def stop(self) -> None:
        """Stop all judges, whatever they are doing."""
        for lane in list(self._lanes):
            self._forget(lane)
            self._spawner.stop(lane.pid)
        self.close()

    def close(self) -> None:
        """Stop the judges kept for reuse."""
        while self._idle:
            lane = self._idle.pop()
            lane.channel.close()
            self._spawner.stop(lane.pid)

    def _queue(self, *, racing: bool) -> deque[_Task]:
        return self._races if racing else self._tasks

    def _staff(self) -> None:
        """Start as many judges as allowed. Timed tasks wait for all others to end."""
        racing = bool(self._races)
        if any(lane.racing is not racing or lane.turn is _Turn.RACING for lane in self._lanes):
            return
        most = max(self._config.workers, len(self._gpus))
        while self._queue(racing=racing) and len(self._lanes) < most:
            self._next(self._lane(racing=racing))

    def _call_up(self) -> None:
        """Let one judge per device time once all have prepared; go on once all have timed."""
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
        """Let a waiting judge continue."""
        lane.turn, lane.heard = turn, time.monotonic()
        try:
            lane.channel.send({"go": True})
        except ChannelClosedError:
            self._lost(lane, "")

    def _lane(self, *, racing: bool) -> _Lane:
        """Return a judge on the GPU with the fewest judges: a kept one or a new one."""
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
        """Give a judge the next task of its kind, if any; timed tasks wait for others to end."""
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
        """Handle a lost judge by continuing one case at a time.

        When a single case kills the judge, run it with ATen alone to find out whose fault it is.
        """
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
        """Clear the kernel of a case that ATen alone does not survive.

        The case is judged without hostile variants. If ATen dies even then, it is not judged.
        """
        _kernel, op, case_id, phase = next(iter(task.waiting))
        if case_id not in task.plain:
            self._go_on(task, frozenset({case_id}))
            return
        reason = f"ATen itself {ended} on this case (the judge's process was lost, not the kernel's)"
        self._record(task, op, [{"id": case_id, "phase": phase, **Finding(Outcome.ERROR, reason).row()}])
        self._go_on(task)

    def _convict(self, task: _Task, ended: str) -> None:
        """Blame the kernel for a lost judge: ATen alone survives the case. No more of it is run."""
        reason = f"the judge's process {ended} while it judged this kernel; with ATen alone it does not"
        row = Finding(Outcome.CRASHED, reason).row()
        for _kernel, op, case_id, phase in list(task.waiting):
            self._record(task, op, [{"id": case_id, "phase": phase, **row}])
        task.ended()

    def _go_on(self, task: _Task, plain: frozenset[str] = frozenset()) -> None:
        """Judge the rest of a task one case at a time."""
        if (rest := task.rest(1, plain)) is not None:
            self._queue(racing=task.racing).appendleft(rest)
        else:
            task.ended()

    def _rest(self, lane: _Lane) -> None:
        """Retire a judge that has nothing left to do."""
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
