"""The local executor: N judges, each with its own worker, fed from one queue of jobs."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opforge.cases import Case, Phase
from opforge.judge.verdict import Finding, Outcome
from opforge.processes import describe_status
from opforge.runs.config import RunConfig
from opforge.runs.plan import Job, Key, Part, Plan
from opforge.sandbox.client import ForkServerProcess, Spawner
from opforge.sandbox.wire import Channel, ChannelClosedError

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


def start_server(device: str, roles: Mapping[str, str] = ROLES) -> ForkServerProcess:
    """Start the fork server; it imports torch while the caller goes on."""
    return ForkServerProcess(roles, {"TRITON_INTERPRET": "1"} if device == "cpu" else {})


@dataclass
class _Task:
    """A job on its way, with what is left of it and how large its batches are."""

    job: Job
    batch: int = _BATCH
    plain: frozenset[str] = frozenset()
    """Cases that are judged as they stand only: ATen itself was lost on one of their hostile forms."""
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
        return _Task(job, batch, self.plain | plain) if job.parts else None


@dataclass
class _Lane:
    """A judge's process and what it is doing."""

    pid: int
    channel: Channel
    task: _Task | None = None
    heard: float = 0.0
    gpu: str = ""
    """The only one that it sees, of several."""


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
        server: ForkServerProcess,
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
        self._tasks: deque[_Task] = deque()
        self._blobs: dict[str, str] = {}

    @property
    def _spawner(self) -> Spawner:
        return self._server.spawner

    def execute(self, plan: Plan, jobs: list[Job]) -> None:
        """Judge all jobs; every case gets its verdict through ``emit``. What is timed comes last, one kernel at a time on a device."""
        self._blobs = {name: str(path) for name, path in plan.suite.blobs.items()}
        self._emit(
            [_without_inputs(job, case) for job in jobs for part in job.parts for case in part.cases if case.lost]
        )
        devices = len(self._gpus)
        for phase, lanes in ((Phase.CORRECTNESS, max(self._config.workers, devices)), (Phase.PERFORMANCE, devices)):
            of_phase = (job.of(phase) for job in jobs)
            self._run([_Task(job) for job in of_phase if job.parts], lanes)

    def _run(self, tasks: list[_Task], lanes: int) -> None:
        self._tasks = deque(tasks)
        for number in range(min(lanes, len(tasks))):
            self._next(self._resumed() or self._lane(self._gpus[number % len(self._gpus)]))
        while len(self._selector.get_map()):
            for key, _events in self._selector.select(timeout=1.0):
                self._hear(key.data)
            self._end_hung()

    def _resumed(self) -> _Lane | None:
        """Return a judge that was kept, if there is one."""
        if not self._idle:
            return None
        lane = self._idle.pop()
        self._selector.register(lane.channel, selectors.EVENT_READ, lane)
        return lane

    def _lane(self, gpu: str) -> _Lane:
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
        lane = _Lane(pid, ours, gpu=gpu)
        self._selector.register(ours, selectors.EVENT_READ, lane)
        return lane

    def _next(self, lane: _Lane) -> None:
        if not self._tasks:
            self._rest(lane)
            return
        lane.task = self._tasks.popleft()
        lane.task.start()
        lane.heard = time.monotonic()
        parts = [part.wire() for part in lane.task.job.parts]
        try:
            job = lane.task.job
            lane.channel.send({
                "kernel": job.kernel.wire(), "ops": parts, "batch": lane.task.batch, "until": job.until,
                "plain": sorted(lane.task.plain), "allow_fallback": self._config.allow_fallback, "serves": list(job.serves),
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
        if "done" in message:
            self._next(lane)
            return
        self._record(lane, message["op"], message["verdicts"])

    def _record(self, lane: _Lane, op: str, verdicts: list[dict[str, Any]]) -> None:
        task = lane.task
        if task is None:
            return
        rows = []
        for verdict in verdicts:
            case = task.waiting.pop(task.key(op, verdict["id"], verdict["phase"]), None)
            if case is not None:
                rows.append({**heading(task.job, case), **verdict})
        self._emit(rows)

    def _end_hung(self) -> None:
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            lane: _Lane = key.data
            if lane.task and now - lane.heard > self._config.timeout_s * (lane.task.batch + 1) + _SLACK_S:
                self._lost(lane, "hung")

    def _lost(self, lane: _Lane, how: str) -> None:
        """A judge has gone: ATen itself crashed or hung. Go on case by case, and name the one that does it."""
        status = self._spawner.stop(lane.pid).status
        self._forget(lane)
        task = lane.task
        if task is not None and task.waiting:
            plain: frozenset[str] = frozenset()
            if task.batch == 1:
                _kernel, op, case_id, phase = next(iter(task.waiting))
                if case_id in task.plain:
                    reason = f"ATen itself {how or describe_status(status)} on this case (the judge's process was lost, not the kernel's)"
                    self._record(lane, op, [{"id": case_id, "phase": phase, **Finding(Outcome.ERROR, reason).row()}])
                else:
                    plain = frozenset({case_id})
            if (rest := task.rest(1, plain)) is not None:
                self._tasks.appendleft(rest)
        if self._tasks:
            self._next(self._lane(lane.gpu))

    def _rest(self, lane: _Lane) -> None:
        """A judge has nothing more to do."""
        lane.task = None
        self._selector.unregister(lane.channel)
        self._idle.append(lane)
        if not self._keep:
            self.close()

    def close(self) -> None:
        """End the judges that were kept."""
        while self._idle:
            lane = self._idle.pop()
            lane.channel.close()
            self._spawner.stop(lane.pid)

    def _forget(self, lane: _Lane) -> None:
        self._selector.unregister(lane.channel)
        lane.channel.close()
