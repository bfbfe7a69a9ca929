"""Scheduler of cluster tasks: a bounded number at a time, each case judged once despite losses."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from opforge.cases import Case, Phase
from opforge.errors import InternalError, OpforgeError
from opforge.judge.verdict import Verdict, VerdictKind
from opforge.kernels.native import is_native
from opforge.runs.execute.judge_pool import result_row
from opforge.runs.execute.ray.node import ForkServerLostError, NoForkServerError, judge_shipment
from opforge.runs.execute.ray.placement import Node, Placement, TaskRequest
from opforge.runs.execute.ray.shipment import pack
from opforge.runs.executors import Emit
from opforge.runs.plan import Job, OperatorCases
from opforge.runs.rows import ResultRow, VerdictKey

MAX_TASK_CASES = 500
"""Maximum number of cases per task; an operator's cases stay together, even if more."""
MAX_LOSSES = 3
MAX_FAILED_STARTS = 10
"""Fork servers that may fail to start before the run gives up: a busy machine may take too long for one."""
_LOOK_EVERY_S = 2.0
_MAX_S_WITHOUT_NODES = 60.0
_PAUSE_S = 0.2
_MAX_UNREAD_MESSAGES = 16
"""Maximum number of a task's messages that wait for the driver."""


def split_job(job: Job, phase: Phase) -> Iterable[Job]:
    """Yield the job's cases of one phase, split between operators into tasks."""
    parts = [replace(p, cases=[c for c in p.cases if c.phase is phase]) for p in job.operators]
    chunk: list[OperatorCases] = []
    count = 0
    for part in (p for p in parts if p.cases):
        if chunk and count + len(part.cases) > MAX_TASK_CASES:
            yield replace(job, operators=tuple(chunk), all_ops=tuple(p.op for p in job.operators))
            chunk, count = [], 0
        chunk.append(part)
        count += len(part.cases)
    if chunk:
        yield replace(job, operators=tuple(chunk), all_ops=tuple(p.op for p in job.operators))


@dataclass
class _RunningChunk:
    """A running chunk."""

    job: Job
    pending: dict[VerdictKey, Case]
    place: TaskRequest
    last_heard_s: float
    record: dict[str, Any] = field(default_factory=dict)


class Scheduler:
    """Sends tasks to a cluster and receives their results."""

    def __init__(
        self,
        ray: Any,
        placement: Placement,
        workers: int,
        emit: Emit,
        record: TextIO,
        patience_s: float,
        nodes: Callable[[], list[Node]],
    ) -> None:
        self._ray = ray
        self._placement = placement
        self._workers = workers
        self._emit = emit
        self._record = record
        self._patience_s = patience_s
        self._list_nodes = nodes
        self._nodes: list[Node] = []
        self._nodes_listed_at = self._node_last_seen_at = float("-inf")
        self._judge = ray.remote(judge_shipment)
        self._pinned_counts: Counter[str] = Counter()
        """Number of tasks pinned to each node."""
        self._losses: Counter[tuple[str, str]] = Counter()
        """Number of lost Ray workers, by the kernel that they judged."""
        self._failed_starts = 0
        self._build_nodes: dict[tuple[str, str], str] = {}
        """The node that built each native kernel."""
        self._running: dict[Any, _RunningChunk] = {}
        self._jobs: deque[Job] = deque()

    def run(self, jobs: Iterable[Job], phase: Phase, settings: Any) -> None:
        """Judge one phase of all jobs."""
        coming = (chunk for job in jobs for chunk in split_job(job, phase))
        while self._send(coming, phase, settings) or self._running:
            self._receive()
            self._cancel_silent()

    def close(self) -> None:
        """Cancel running tasks."""
        for task in list(self._running):
            self._ray.cancel(task, force=True)
        self._running.clear()

    def _send(self, coming: Iterable[Job], phase: Phase, settings: Any) -> bool:
        """Start tasks up to the limit; return whether any may be left."""
        self._refresh_nodes()
        limit = self._placement.max_tasks(self._nodes, phase, self._workers)
        iterator = iter(coming)
        while len(self._running) < max(1, limit):
            job = self._jobs.popleft() if self._jobs else next(iterator, None)
            if job is None:
                return False
            if self._losses[_name(job)] >= MAX_LOSSES:
                self._give_up(job, _waiting_cases(job))
                continue
            place = self._placement.request(
                self._nodes, phase, self._pinned_counts, self._build_nodes.get(_name(job), "")
            )
            if place is None:
                self._jobs.appendleft(job)
                break
            self._start(job, place, phase, settings)
        return True

    def _refresh_nodes(self) -> None:
        now = time.monotonic()
        if now - self._nodes_listed_at < _LOOK_EVERY_S:
            return
        self._nodes_listed_at = now
        self._nodes = self._placement.usable(self._list_nodes())
        if self._nodes or self._node_last_seen_at < 0:
            self._node_last_seen_at = now
        elif now - self._node_last_seen_at > _MAX_S_WITHOUT_NODES:
            raise OpforgeError(
                f"the cluster has had no node to judge on for {_MAX_S_WITHOUT_NODES:.0f} s; repair it, and continue "
                "with --resume"
            )

    def _start(self, job: Job, place: TaskRequest, phase: Phase, settings: Any) -> None:
        options: dict[str, Any] = {
            "num_cpus": place.cpus,
            "num_gpus": place.gpus,
            "max_retries": 0,
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": _MAX_UNREAD_MESSAGES,
        }
        if place.node:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                place.node, soft=not place.pinned, _spill_on_unavailable=not place.pinned
            )
        self._pinned_counts[place.node] += place.pinned
        flying = self._judge.options(**options).remote(settings, pack(job), timed=phase is Phase.PERFORMANCE)
        record = {"kernel": job.kernel.name, "phase": phase.value, "cases": job.case_count}
        self._running[flying] = _RunningChunk(job, _waiting_cases(job), place, time.monotonic(), record)

    def _receive(self) -> None:
        """Receive results: wait for the first, then take all that are ready."""
        flying = list(self._running)
        if not flying:  # no node to send to
            time.sleep(_PAUSE_S)
            return
        ready, _ = self._ray.wait(flying, timeout=1.0, fetch_local=False)
        if ready and len(flying) > 1:
            ready, _ = self._ray.wait(flying, num_returns=len(flying), timeout=0, fetch_local=False)
        for stream in ready:
            self._receive_message(stream)

    def _receive_message(self, flying: Any) -> None:
        task = self._running[flying]
        errors = self._ray.exceptions
        try:
            message = self._ray.get(next(flying))
        except StopIteration:
            self._finish(flying, "done")
        except errors.RayTaskError as error:
            self._failed(flying, error)
        except errors.TaskUnschedulableError:  # its node went away before it began
            self._finish(flying, "lost")
            self._retry(task, None)
        except errors.RayError as error:
            self._finish(flying, "lost")
            self._retry(task, error)
        else:
            task.last_heard_s = time.monotonic()
            rows = map(ResultRow.from_wire, message.pop("rows", []))
            task.record.update(message)
            if "began" in message and is_native(task.job.kernel.file or ""):
                self._build_nodes.setdefault(_name(task.job), message["node"])
            self._emit([row for row in rows if task.pending.pop(row.key, None) is not None])

    def _failed(self, flying: Any, error: Any) -> None:
        """Handle a task that raised: retry lost work, report user errors, and raise anything else.

        Any other error is a bug in opforge.
        """
        cause = error.cause
        if isinstance(cause, ForkServerLostError):
            task = self._running[flying]
            self._finish(flying, "lost")
            self._retry(task, cause)
        elif isinstance(cause, NoForkServerError):
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise OpforgeError(
                    f"a node of the cluster could not start a fork server, {MAX_FAILED_STARTS} times now: {cause}; see "
                    "whether its machine is overloaded (Ray gives its workers a low priority), and continue with "
                    "--resume"
                ) from None
            task = self._running[flying]
            self._finish(flying, "not started")
            self._retry(task, None)
        elif isinstance(cause, OpforgeError):
            raise cause from None
        else:
            raise InternalError(f"a task on a node of the cluster failed: {error}") from error

    def _retry(self, task: _RunningChunk, error: BaseException | None) -> None:
        """Retry the rest of a lost task elsewhere; a kernel that lost too many is not retried."""
        name = _name(task.job)
        if error is not None and "began" in task.record:
            self._losses[name] += 1
        remaining = replace(task.job, operators=tuple(_left(task)))
        if not remaining.operators:
            return
        if self._losses[name] >= MAX_LOSSES:
            self._give_up(remaining, task.pending)
        else:
            self._jobs.append(remaining)

    def _give_up(self, job: Job, waiting: dict[VerdictKey, Case]) -> None:
        reason = f"the Ray worker that judged it died {MAX_LOSSES} times; it is not tried again"
        verdict = Verdict(VerdictKind.CRASHED, reason).wire()
        self._emit([result_row(job, case, verdict) for case in waiting.values()])

    def _cancel_silent(self) -> None:
        """Cancel started tasks that have been silent for longer than their own limits allow."""
        now = time.monotonic()
        for flying, task in list(self._running.items()):
            if "began" in task.record and now - task.last_heard_s > self._patience_s:
                self._ray.cancel(flying, force=True)
                self._finish(flying, "silent")
                self._retry(task, TimeoutError())

    def _finish(self, flying: Any, how: str) -> None:
        task = self._running.pop(flying)
        self._pinned_counts[task.place.node] -= task.place.pinned
        line = {**task.record, "ended": task.record.get("ended", time.time()), "end": how}
        self._record.write(json.dumps(line) + "\n")
        self._record.flush()


def _name(job: Job) -> tuple[str, str]:
    """Return a kernel's identity; all of ATen's own kernels share one name."""
    return job.kernel.name, job.kernel.primary


def _waiting_cases(job: Job) -> dict[VerdictKey, Case]:
    return {(job.kernel.name, p.op, c.id, c.phase.value): c for p in job.operators for c in p.cases}


def _left(task: _RunningChunk) -> Iterable[OperatorCases]:
    name = task.job.kernel.name
    for part in task.job.operators:
        if cases := [c for c in part.cases if (name, part.op, c.id, c.phase.value) in task.pending]:
            yield replace(part, cases=cases)
