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
from opforge.judge.verdict import Verdict, VerdictKind
from opforge.procs.channel import Channel, ChannelClosedError
from opforge.procs.linux import describe_status
from opforge.runs.config import RunConfig
from opforge.runs.execute.activity import ActivityRecorder, TimeUse, gpus_of
from opforge.runs.executors import Emit
from opforge.runs.manifest import Activity, Manifest
from opforge.runs.plan import Job, OperatorCases, Plan
from opforge.runs.rows import ResultRow, VerdictKey
from opforge.sandbox.host import system_check, warm
from opforge.sandbox.host.client import SERVER_VARIABLE, ForkServerHandle, ForkServerProcess, Spawner
from opforge.suites import LoadedSuite

ROLES = {
    "worker": "opforge.sandbox.guest.worker:serve",
    "judge": "opforge.judge.process:serve",
    "inputs": "opforge.judge.gen_input:serve",
    "probe": "opforge.sandbox.host.system_check:serve",
    "peaks": "opforge.judge.roofline.peaks:serve",
}
_BATCH = 96
_SLACK_S = 180.0
"""Time beyond the kernel's own limit before a judge counts as hung in ATen."""


def do_nothing() -> None:
    """Do nothing."""


def _ignore_names(_ops: str) -> None:
    """Ignore the names of the operators being judged."""


def confinement_settings(config: RunConfig, folder: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Return the judges' settings for confining workers; None if confinement is off.

    Workers may not see the run's folder.
    """
    held = not manifest.missing_protections
    return {"run": str(folder.resolve()), "held": held} if config.confine else None


def start_server(device: str, roles: Mapping[str, str] = ROLES, *, confined: bool = True) -> ForkServerHandle:
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
class _QueuedJob:
    """A queued or running job: its remaining cases and its batch size."""

    job: Job
    emit: Emit
    on_done: Callable[[], None] = do_nothing
    """Called when all its cases have been judged."""
    is_timed: bool = False
    """Whether it is timed, and so needs exclusive use of the machine in the end."""
    batch: int = _BATCH
    plain_case_ids: frozenset[str] = frozenset()
    """Cases judged without hostile variants, because ATen itself crashed or hung on one of them."""
    suspect_task: _QueuedJob | None = None
    """On a task that runs a case with ATen alone: the task whose judge was lost on that case."""
    judge_ending: str = ""
    """How that judge ended."""
    pending: dict[VerdictKey, Case] = field(default_factory=dict)

    def start(self) -> None:
        """List the remaining cases; done late, as many tasks may share the same cases."""
        self.pending = {self.key(p.op, c.id, c.phase): c for p in self.job.operators for c in p.cases}

    def key(self, op: str, case_id: str, phase: str) -> VerdictKey:
        return (self.job.kernel.name, op, case_id, phase)

    def rest(self, batch: int, plain: frozenset[str]) -> _QueuedJob | None:
        parts = [
            OperatorCases(p.op, p.required, [c for c in p.cases if self.key(p.op, c.id, c.phase) in self.pending])
            for p in self.job.operators
        ]
        job = replace(self.job, operators=tuple(p for p in parts if p.cases))
        return (
            replace(self, job=job, batch=batch, plain_case_ids=self.plain_case_ids | plain, pending={})
            if job.operators
            else None
        )

    @property
    def position(self) -> list[int]:
        """Return the index of the first remaining case and the case count of its operator."""
        part, number = self._first
        return [number, len(part.cases)]

    @property
    def _first(self) -> tuple[OperatorCases, int]:
        key = next(iter(self.pending))
        positions = ((p, i, self.key(p.op, c.id, c.phase)) for p in self.job.operators for i, c in enumerate(p.cases))
        return next((part, number) for part, number, candidate in positions if candidate == key)

    def aten_alone(self, lost: str) -> _QueuedJob:
        """Return a task that runs a lost judge's case with ATen alone, in the same variants."""
        part, number = self._first
        job = replace(self.job, operators=(replace(part, cases=[part.cases[number]]),))
        return replace(self, job=job, suspect_task=self, judge_ending=lost, on_done=do_nothing, pending={})


class _TimingState(Enum):
    """Timing state of a judge.

    All judges prepare at once. Then they time one after the other, while all others wait.
    """

    NONE = "prepares"
    READY = "waits for the device"
    TIMING = "times it"
    TIMED = "waits for the others"


@dataclass
class _JudgeProcess:
    """A judge process and its current task."""

    pid: int
    channel: Channel
    is_timed: bool = False
    state: _TimingState = _TimingState.NONE
    task: _QueuedJob | None = None
    last_heard_s: float = 0.0
    gpu: str = ""
    """The one GPU visible to it, if there are several."""


_TIME_USES = {_TimingState.NONE: TimeUse.JUDGING, _TimingState.TIMING: TimeUse.TIMING}
_STATE_OF_MESSAGE = {"ready": _TimingState.READY, "raced": _TimingState.TIMED}
"""Messages after which a judge waits for permission to continue."""


def result_row(job: Job, case: Case, verdict: dict[str, Any]) -> ResultRow:
    """Return the line of a case from the wire form of its verdict."""
    head = {"op": case.op, "kernel": job.kernel.name, "case": case.args, "source": case.source}
    return ResultRow.from_wire({**head, "id": case.id, "phase": case.phase.value, **verdict})


def _missing_inputs_row(job: Job, case: Case) -> ResultRow:
    """Return the line of a case whose inputs could not be made.

    It is not the kernel's fault, but the case is not correct either.
    """
    return result_row(job, case, Verdict(VerdictKind.ERROR, f"its inputs could not be made: {case.lost}").wire())


class JudgePool:
    """Runs the jobs of a plan on this machine."""

    def __init__(
        self,
        config: RunConfig,
        server: ForkServerHandle,
        emit: Emit,
        confine: dict[str, Any] | None = None,
        peaks: dict[str, Any] | None = None,
        *,
        keep_judges: bool = False,
        gpus: Sequence[str] = (),
        limit_judges: bool = False,
    ) -> None:
        """Create an executor.

        ``keep_judges`` keeps the judges for the next execution, until ``close``. ``gpus`` are the
        GPUs to share out, if there are several. ``limit_judges`` gives judges the memory limit of a
        kernel's process, for cases of strangers.
        """
        self._config = config
        self._keep = keep_judges
        self._gpus = gpus or ("",)
        self._idle_judges: list[_JudgeProcess] = []
        self._peaks = peaks
        self._confine = confine
        self._server = server
        self._emit = emit
        self._selector = selectors.DefaultSelector()
        self._judges: list[_JudgeProcess] = []
        self._tasks: deque[_QueuedJob] = deque()
        self._timed_tasks: deque[_QueuedJob] = deque()
        self._blobs: dict[str, str] = {}
        self._has_native_runtime = False
        self._recorder = ActivityRecorder(gpus_of(config.device, gpus))
        self._judge_limits: dict[str, int] = {}
        if limit_judges and (memory := config.memory_bytes) is not None:
            self._judge_limits["memory_bytes"] = memory

    @property
    def _spawner(self) -> Spawner:
        return self._server.spawner

    def execute(self, plan: Plan, jobs: list[Job], on_judging: Callable[[str], None] = _ignore_names) -> None:
        """Judge all jobs and emit a verdict for every case.

        Timed cases come last, one at a time per device. ``on_judging`` is called now and then with the
        names of the operators being judged.
        """
        self.use_suite(plan.suite)
        self._emit(
            [
                _missing_inputs_row(job, case)
                for job in jobs
                for part in job.operators
                for case in part.cases
                if case.lost
            ]
        )
        for phase in (Phase.CORRECTNESS, Phase.PERFORMANCE):
            for job in jobs:
                self.add(job, phase, self._emit)
            while self.busy:
                self.step()
                if names := sorted(
                    {next(iter(judge.task.pending))[1] for judge in self._judges if judge.task and judge.task.pending}
                ):
                    on_judging(", ".join(names))

    def use_suite(self, suite: LoadedSuite) -> None:
        """Give judges started from now on the stored tensors of a suite."""
        self._blobs = {name: str(path) for name, path in suite.blobs.items()}

    def add(self, job: Job, phase: Phase, emit: Emit, on_done: Callable[[], None] = do_nothing) -> None:
        """Queue the cases of one phase of a job.

        Races run before other queued tasks, once the running tasks have ended.
        """
        task = _QueuedJob(job.in_phase(phase), emit, on_done, is_timed=phase is Phase.PERFORMANCE)
        if not task.job.operators:
            on_done()
            return
        self._queue(racing=task.is_timed).append(task)

    def watch_socket(self, source: socket.socket, on_readable: Callable[[], None]) -> None:
        """Also watch a socket during each step; ``on_readable`` is called when it is readable."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    @property
    def busy(self) -> bool:
        """Whether anything is running or queued."""
        return bool(self._judges or self._timed_tasks or self._tasks)

    @property
    def activity(self) -> Activity:
        """Return how the judges have spent their time."""
        return self._recorder.activity()

    @property
    def judge_count(self) -> int:
        """Number of running judges."""
        return len(self._judges)

    def step(self, timeout_s: float = 1.0) -> None:
        """Start judges for queued tasks and handle messages from running ones."""
        self._start_judges()
        self._grant_timing()
        ready = self._selector.select(timeout=timeout_s)
        self._recorder.advance(_TIME_USES.get(judge.state, TimeUse.WAITING) for judge in self._judges)
        for key, _events in ready:
            if isinstance(key.data, _JudgeProcess):
                self._receive(key.data)
            else:
                key.data()
        self._stop_hung()

    def stop(self) -> None:
        """Stop all judges, whatever they are doing."""
        for judge in list(self._judges):
            self._unregister(judge)
            self._spawner.stop(judge.pid)
        self.close()

    def close(self) -> None:
        """Stop the judges kept for reuse."""
        while self._idle_judges:
            judge = self._idle_judges.pop()
            judge.channel.close()
            self._spawner.stop(judge.pid)

    def _queue(self, *, racing: bool) -> deque[_QueuedJob]:
        return self._timed_tasks if racing else self._tasks

    def _start_judges(self) -> None:
        """Start as many judges as allowed. Timed tasks wait for all others to end."""
        racing = bool(self._timed_tasks)
        if any(judge.is_timed is not racing or judge.state is _TimingState.TIMING for judge in self._judges):
            return
        max_judges = max(self._config.workers, len(self._gpus))
        while self._queue(racing=racing) and len(self._judges) < max_judges:
            self._next(self._obtain_judge(racing=racing))

    def _grant_timing(self) -> None:
        """Let one judge per device time once all have prepared; go on once all have timed."""
        if any(judge.state is _TimingState.NONE for judge in self._judges):
            return
        busy_gpus = {judge.gpu for judge in self._judges if judge.state is _TimingState.TIMING}
        for judge in [judge for judge in self._judges if judge.state is _TimingState.READY]:
            if judge.gpu not in busy_gpus:
                busy_gpus.add(judge.gpu)
                self._let_continue(judge, _TimingState.TIMING)
        if not busy_gpus:
            for judge in list(self._judges):
                self._let_continue(judge, _TimingState.NONE)

    def _let_continue(self, judge: _JudgeProcess, state: _TimingState) -> None:
        """Let a waiting judge continue."""
        judge.state, judge.last_heard_s = state, time.monotonic()
        try:
            judge.channel.send({"go": True})
        except ChannelClosedError:
            self._handle_lost_judge(judge, "")

    def _obtain_judge(self, *, racing: bool) -> _JudgeProcess:
        """Return a judge on the GPU with the fewest judges: a kept one or a new one."""
        gpu = min(self._gpus, key=[judge.gpu for judge in self._judges].count)
        idle = next((judge for judge in self._idle_judges if judge.gpu == gpu), None)
        if idle is None:
            judge = self._start_judge(gpu)
        else:
            self._idle_judges.remove(idle)
            judge = idle
        judge.is_timed = racing
        self._judges.append(judge)
        self._selector.register(judge.channel, selectors.EVENT_READ, judge)
        return judge

    def _start_judge(self, gpu: str) -> _JudgeProcess:
        if self._config.runtime == "native" and not self._has_native_runtime:
            system_check.load_native_runtime(self._spawner)
            self._has_native_runtime = True
        ours, theirs = Channel.pair()
        line = self._spawner.connect(gpu)
        settings = {
            "device": self._config.device,
            "timeout_s": self._config.timeout_s,
            "race_s": self._config.race_s,
            "memory_bytes": self._config.memory_bytes,
            "blobs": self._blobs,
            "confine": self._confine,
            "peaks": self._peaks,
            "gpu": gpu,
            "native": self._config.runtime == "native",
        }
        fds = [theirs.fileno(), line.fileno()]
        pid = self._spawner.spawn("judge", settings, fds, limits=self._judge_limits, output=False)
        theirs.close()
        line.close()
        return _JudgeProcess(pid, ours, gpu=gpu)

    def _next(self, judge: _JudgeProcess) -> None:
        """Give a judge the next task of its kind, if any; timed tasks wait for others to end."""
        queue = self._queue(racing=judge.is_timed)
        if not queue or (self._timed_tasks and not judge.is_timed):
            self._retire(judge)
            return
        judge.task = queue.popleft()
        judge.task.start()
        judge.last_heard_s = time.monotonic()
        parts = [part.wire() for part in judge.task.job.operators]
        try:
            job = judge.task.job
            judge.channel.send({
                "kernel": job.kernel.wire(), "ops": parts, "batch": judge.task.batch, "until": job.stop_on,
                "plain": sorted(judge.task.plain_case_ids), "allow_fallback": self._config.allow_fallback,
                "serves": list(job.all_ops),
                "aten_alone": judge.task.suspect_task.position if judge.task.suspect_task is not None else None,
            })  # fmt: skip
        except ChannelClosedError:
            self._handle_lost_judge(judge, "")

    def _receive(self, judge: _JudgeProcess) -> None:
        try:
            message = judge.channel.receive(_SLACK_S)
        except (ChannelClosedError, TimeoutError):
            self._handle_lost_judge(judge, "")
            return
        judge.last_heard_s = time.monotonic()
        if state := next((state for word, state in _STATE_OF_MESSAGE.items() if word in message), None):
            judge.state = state
            return
        if "done" in message:
            task = judge.task
            if task is not None and task.suspect_task is not None:
                self._blame_kernel(task.suspect_task, task.judge_ending)
            self._next(judge)
            if task is not None:
                task.on_done()
            return
        if judge.task is not None:
            self._record(judge.task, message["op"], message["verdicts"])

    def _record(self, task: _QueuedJob, op: str, verdicts: list[dict[str, Any]]) -> None:
        rows = []
        for verdict in verdicts:
            case = task.pending.pop(task.key(op, verdict["id"], verdict["phase"]), None)
            if case is not None:
                rows.append(result_row(task.job, case, verdict))
        task.emit(rows)

    def _stop_hung(self) -> None:
        now = time.monotonic()
        for judge in list(self._judges):
            is_waiting = judge.state in _STATE_OF_MESSAGE.values()
            if (
                judge.task
                and not is_waiting
                and now - judge.last_heard_s > self._config.timeout_s * (judge.task.batch + 1) + _SLACK_S
            ):
                self._handle_lost_judge(judge, "hung")

    def _handle_lost_judge(self, judge: _JudgeProcess, how: str) -> None:
        """Handle a lost judge by continuing one case at a time.

        When a single case kills the judge, run it with ATen alone to find out whose fault it is.
        """
        status = self._spawner.stop(judge.pid).status
        self._unregister(judge)
        task = judge.task
        if task is None:
            return
        ending = how or describe_status(status)
        if task.suspect_task is not None:
            self._blame_aten(task.suspect_task, ending)
        elif task.pending and task.batch == 1:
            self._queue(racing=task.is_timed).appendleft(task.aten_alone(ending))
        else:
            self._judge_rest(task)

    def _blame_aten(self, task: _QueuedJob, ending: str) -> None:
        """Clear the kernel of a case that ATen alone does not survive.

        The case is judged without hostile variants. If ATen dies even then, it is not judged.
        """
        _kernel, op, case_id, phase = next(iter(task.pending))
        if case_id not in task.plain_case_ids:
            self._judge_rest(task, frozenset({case_id}))
            return
        reason = f"ATen itself {ending} on this case (the judge's process died, not the kernel's)"
        self._record(task, op, [{"id": case_id, "phase": phase, **Verdict(VerdictKind.ERROR, reason).wire()}])
        self._judge_rest(task)

    def _blame_kernel(self, task: _QueuedJob, ending: str) -> None:
        """Blame the kernel for a lost judge: ATen alone survives the case. No more of it is run."""
        reason = f"the judge's process {ending} while it judged this kernel; with ATen alone it does not"
        row = Verdict(VerdictKind.CRASHED, reason).wire()
        for _kernel, op, case_id, phase in list(task.pending):
            self._record(task, op, [{"id": case_id, "phase": phase, **row}])
        task.on_done()

    def _judge_rest(self, task: _QueuedJob, plain: frozenset[str] = frozenset()) -> None:
        """Judge the rest of a task one case at a time."""
        if (rest := task.rest(1, plain)) is not None:
            self._queue(racing=task.is_timed).appendleft(rest)
        else:
            task.on_done()

    def _retire(self, judge: _JudgeProcess) -> None:
        """Retire a judge that has nothing left to do."""
        judge.task = None
        self._selector.unregister(judge.channel)
        self._judges.remove(judge)
        self._idle_judges.append(judge)
        if not self._keep:
            self.close()

    def _unregister(self, judge: _JudgeProcess) -> None:
        self._judges.remove(judge)
        self._selector.unregister(judge.channel)
        judge.channel.close()
