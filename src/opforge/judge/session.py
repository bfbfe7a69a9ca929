"""The judge's process: takes jobs (a kernel and its cases) from the main process, and answers with verdicts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Phase
from opforge.cases.materialise import Bytes
from opforge.cases.store import open_blob
from opforge.errors import CaseSyntaxError
from opforge.judge import distribution, timing
from opforge.judge.batch import MAX_BYTES, MAX_CASES, Batch, CaseRow, Placed
from opforge.judge.contract import Hearing
from opforge.judge.reference import Answer
from opforge.judge.rooms import Rooms
from opforge.judge.verdict import Finding, Outcome
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.ops import Operator, table
from opforge.sandbox.client import Spawner
from opforge.sandbox.wire import Channel

_MAX_DEATHS = 3
"""After so many dead processes on one operator the rest of its cases are not run."""
_TWICE = 2
"""How many cases of an operator are run twice, to see the same answer."""
_LOAD_LIMIT_S = 120.0


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Judge jobs until the main process hangs up."""
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    blobs = {name: open_blob(Path(path)) for name, path in config["blobs"].items()}
    workers = WorkerConfig(config["device"], config["timeout_s"], config["memory_bytes"])
    rooms = Rooms(spawner, **config["confine"]) if config.get("confine") else None
    judge = Judge(channel, spawner, workers, blobs, rooms)
    while True:
        judge.job(channel.receive())
        channel.send({"done": True})


@dataclass
class _Op:
    facts: Operator
    required: bool
    kernel: dict[str, Any]
    deaths: int = 0


class Judge:
    """Judges one job at a time; holds at most one worker for the kernel and one for the baseline."""

    def __init__(
        self,
        channel: Channel,
        spawner: Spawner,
        workers: WorkerConfig,
        blobs: Mapping[str, Bytes],
        rooms: Rooms | None = None,
    ) -> None:
        self._channel = channel
        self._spawner = spawner
        self._config = workers
        self._device = torch.device(workers.device)
        self._blobs = blobs
        self._rooms = rooms
        self._buffer: Bytes = np.zeros(MAX_BYTES + (1 << 20), np.uint8)
        self._worker: KernelWorker | None = None
        self._baseline: KernelWorker | None = None
        self._broken: Finding | None = None

    def job(self, job: dict[str, Any]) -> None:
        """Judge one kernel on the cases of the operators that it serves."""
        self._broken = None
        try:
            for part in job["ops"]:
                facts = table().get(part["op"])
                if facts is None:
                    raise ValueError(f"the job names an unknown operator {part['op']!r}")
                op = _Op(facts, part["required"], job["kernel"])
                cases = [CaseRow.from_wire(row) for row in part["cases"]]
                self._judge(op, cases, job["batch"])
        finally:
            self._end_worker()
            if self._rooms is not None:
                self._rooms.clear()

    def _judge(self, op: _Op, cases: list[CaseRow], batch_size: int) -> None:
        waiting = deque(cases)
        fresh = batch_size > 1
        while waiting:
            if op.deaths >= _MAX_DEATHS and self._broken is None:
                self._emit(op, [(case, _not_run(op)) for case in waiting])
                return
            worker = self._ready_worker(op.kernel)
            if worker is None or self._broken is not None:
                self._emit(op, [(case, self._broken or _not_run(op)) for case in waiting])
                return
            batch, refused = self._fill(op, waiting, batch_size, twice=fresh)
            fresh = False
            self._emit(op, refused)
            if batch.placed:
                self._run(op, worker, batch, waiting)

    def _fill(
        self, op: _Op, waiting: deque[CaseRow], batch_size: int, *, twice: bool
    ) -> tuple[Batch, list[tuple[CaseRow, Finding]]]:
        batch = Batch(op.facts, self._device, self._config.in_bytes, self._blobs, self._buffer)
        refused: list[tuple[CaseRow, Finding]] = []
        limit = min(batch_size, MAX_CASES)
        while waiting and len(batch.placed) < limit and not batch.full:
            case = waiting[0]
            try:
                if not batch.add(case):
                    break
            except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
                refused.append((case, Finding(Outcome.UNSUPPORTED, f"the case cannot be made here: {error}")))
            waiting.popleft()
            if (
                twice
                and batch.placed
                and len(batch.placed) < 2 * _TWICE
                and not op.facts.random
                and batch.placed[-1].case is case
            ):
                with contextlib.suppress(MemoryError):  # no room for a second copy
                    batch.add(case, again=True)
        return batch, refused

    def _run(self, op: _Op, worker: KernelWorker, batch: Batch, waiting: deque[CaseRow]) -> None:
        batch.copy_to(worker.bytes)
        try:
            worker.begin({"do": "call", "op": op.facts.name, "cases": [p.request() for p in batch.placed]})
            answers = [p.call.run() for p in batch.placed]
            reply = worker.answer(cases=len(batch.placed))
        except DeathError as death:
            self._death(op, batch, death, waiting)
            return
        replies = _replies(reply, len(batch.placed))
        if replies is None:
            self._end_worker()
            forged = Finding(Outcome.CONTRACT, "the worker's reply is not one that our harness writes")
            self._emit(op, [(p.case, forged) for p in batch.placed if not p.again])
            return
        findings = self._hear(op, worker, batch, answers, replies)
        if self._worker is None:  # lost while it was timed or drawn from
            self._emit(op, findings)
            return
        if strays := worker.orphans():
            breach = Finding(Outcome.CONTRACT, f"left {strays} process(es) running that it had started and cut loose")
            findings = [(case, breach if finding.passed else finding) for case, finding in findings]
        worker.release(batch.used)
        self._emit(op, findings)

    def _death(self, op: _Op, batch: Batch, death: DeathError, waiting: deque[CaseRow]) -> None:
        """Give the case that was running its verdict, and put the others of its batch back."""
        self._worker = None
        op.deaths += 1
        index = min(death.index, len(batch.placed) - 1)
        victim = batch.placed[index].case
        back = [p.case for p in batch.placed if not p.again and p.case is not victim]
        waiting.extendleft(reversed(back))
        self._emit(op, [(victim, Finding(death.outcome, str(death)))])

    def _hear(
        self, op: _Op, worker: KernelWorker, batch: Batch, answers: list[Answer], replies: list[dict[str, Any]]
    ) -> list[tuple[CaseRow, Finding]]:
        touched = batch.touched(worker.bytes)
        results = bytearray(worker.bytes[self._config.in_bytes : _results_end(replies, self._config)])
        findings: list[tuple[CaseRow, Finding]] = []
        for placed, aten, reply, inputs in zip(batch.placed, answers, replies, touched, strict=True):
            hearing = Hearing(
                op.facts,
                op.required,
                placed.case.expect,
                placed.call,
                aten,
                reply,
                results,
                self._config.in_bytes,
                inputs,
            )
            finding = hearing.finding()
            if finding.passed and self._worker is None and (op.facts.random or placed.case.phase is Phase.PERFORMANCE):
                finding = Finding(
                    Outcome.CRASHED, "not looked at further: the kernel's process was lost on a case before it"
                )
            if finding.passed and op.facts.random:
                finding = self._surviving(self._draw, op, worker, placed, hearing) or finding
            if placed.again:
                findings[-1] = (placed.case, _twice(findings[-1][1], finding))
                continue
            if finding.passed and placed.case.phase is Phase.PERFORMANCE:
                finding = self._surviving(self._race, op, worker, batch, placed, finding) or finding
            findings.append((placed.case, finding))
        return findings

    def _surviving(self, ask: Callable[..., Finding | None], *args: Any) -> Finding | None:
        """Ask more of a worker; when it dies of it, that is the verdict."""
        try:
            return ask(*args)
        except DeathError as death:
            self._end_worker()
            return Finding(death.outcome, str(death))

    def _draw(self, op: _Op, worker: KernelWorker, placed: Placed, hearing: Hearing) -> Finding | None:
        """Judge a random operator by many draws, unless its first draw is ATen's own to the bit."""
        if all(distribution.identical(k, a) for k, a in hearing.values) and hearing.values:
            return None
        drawn = [[(k, a)] for k, a in hearing.values]
        for number in range(1, distribution.DRAWS):
            if all(sum(k.numel() for k, _ in pairs) >= distribution.ENOUGH for pairs in drawn):
                break
            seed = number * 7919
            reply = worker.ask({"do": "call", "op": op.facts.name, "cases": [{**placed.request(), "seed": seed}]})
            replies = _replies(reply, 1)
            if replies is None:
                return Finding(Outcome.CONTRACT, "the worker's reply is not one that our harness writes")
            results = bytearray(worker.bytes[self._config.in_bytes : _results_end(replies, self._config)])
            again = Hearing(
                op.facts, op.required, placed.case.expect, placed.call, placed.call.run(seed=seed + 1), replies[0],
                results, self._config.in_bytes,
            )  # fmt: skip
            finding = again.finding()
            if not finding.passed:
                return finding
            for pairs, pair in zip(drawn, again.values, strict=True):
                pairs.append(pair)
        for index, pairs in enumerate(drawn):
            if distribution.stuck([k for k, _ in pairs], [a for _, a in pairs]):
                return Finding(Outcome.WRONG, f"result[{index}]: the same draw whatever the seed")
            difference = distribution.differs(
                torch.cat([k.reshape(-1) for k, _ in pairs]),
                torch.cat([a.detach().cpu().reshape(-1) for _, a in pairs]),
            )
            if difference is not None:
                return Finding(Outcome.WRONG, f"result[{index}]: {difference}")
        return None

    def _race(self, op: _Op, worker: KernelWorker, batch: Batch, placed: Placed, finding: Finding) -> Finding:
        """Time a case that is right, against ATen in a clean worker of its own."""
        if self._baseline is None:
            room = self._rooms.baseline() if self._rooms is not None else None
            self._baseline = KernelWorker(self._spawner, self._config, room)
            self._baseline.ask({"do": "load", "kernel": {"file": None, "primary": op.facts.name, "entries": []}})
        batch.copy_to(self._baseline.bytes)
        try:
            times = timing.race(worker, self._baseline, op.facts.name, placed.request())
        except timing.BaselineError as error:
            self._baseline = None
            note = f"not timed: ATen's own process was lost ({error})"
            return Finding(finding.outcome, finding.reason, (*finding.notes, note), finding.figures)
        except timing.ForgedTimesError:
            return Finding(Outcome.CONTRACT, "the worker's times are not ones that our harness writes")
        return Finding(finding.outcome, finding.reason, finding.notes, {**finding.figures, **times})

    def _ready_worker(self, kernel: dict[str, Any]) -> KernelWorker | None:
        """Return a worker with the kernel loaded; None, with the reason kept, when it cannot be loaded."""
        if self._worker is not None or self._broken is not None:
            return self._worker
        room = self._rooms.for_kernel(kernel["file"]) if self._rooms is not None else None
        worker = KernelWorker(self._spawner, self._config, room)
        try:
            reply = worker.ask({"do": "load", "kernel": kernel}, timeout_s=max(_LOAD_LIMIT_S, self._config.timeout_s))
        except DeathError as death:
            self._broken = Finding(death.outcome, f"while loading: {death}")
            return None
        if not isinstance(reply, dict):
            worker.close()
            self._broken = Finding(
                Outcome.CONTRACT, "while loading: the worker's reply is not one that our harness writes"
            )
            return None
        if "tried" in reply:
            worker.close()
            self._broken = Finding(Outcome.CHEATED, f"while loading: {reply['tried']}")
            return None
        if "error" in reply:
            worker.close()
            self._broken = Finding(Outcome.ERROR, f"cannot be loaded: {reply['error']}")
            return None
        self._worker = worker
        return worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _emit(self, op: _Op, findings: list[tuple[CaseRow, Finding]]) -> None:
        if findings:
            rows = [{"id": case.id, "phase": case.phase.value, **finding.row()} for case, finding in findings]
            self._channel.send({"op": op.facts.name, "verdicts": rows})


def _replies(reply: Any, count: int) -> list[dict[str, Any]] | None:
    """Return the worker's answers to the cases of a batch, or None when that is not what it sent."""
    replies = reply.get("results") if isinstance(reply, dict) else None
    if isinstance(replies, list) and len(replies) == count and all(isinstance(r, dict) for r in replies):
        return replies
    return None


def _results_end(replies: list[dict[str, Any]], config: WorkerConfig) -> int:
    """Return where the results that the replies speak of end, within the arena."""
    rows = (row for row in _result_rows(replies) if isinstance(row[0], int) and isinstance(row[1], int))
    ends: list[int] = [config.in_bytes, *(row[0] + row[1] for row in rows)]
    return min(max(ends), config.arena_bytes)


def _result_rows(tree: Any) -> Iterator[list[Any]]:
    """Yield the rows of all tensors that replies speak of; the replies may hold anything."""
    if isinstance(tree, dict):
        inputs = tree.get("inputs")
        for row in [tree.get("T"), *(inputs if isinstance(inputs, list) else [])]:
            if isinstance(row, list) and len(row) > 1:
                yield row
        yield from _result_rows(tree.get("returned"))
    elif isinstance(tree, list):
        for value in tree:
            yield from _result_rows(value)


def _twice(first: Finding, second: Finding) -> Finding:
    if first.passed and not second.passed:
        return Finding(Outcome.CONTRACT, f"another answer to the same inputs the second time: {second.reason}")
    return first


def _not_run(op: _Op) -> Finding:
    return Finding(Outcome.CRASHED, f"not run: the kernel's process was lost {op.deaths} times on {op.facts.name}")
