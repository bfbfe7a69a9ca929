"""Judge process: takes jobs (a kernel and its cases) from the main process, returns verdicts."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Expect, Phase
from opforge.cases.forms import LARGE_FORMS
from opforge.cases.materialise import Bytes
from opforge.cases.store import open_blob
from opforge.errors import CaseSyntaxError
from opforge.judge import bypass, forms, further
from opforge.judge.asked import LOAD_LIMIT_S, AskedCall, Reference
from opforge.judge.batch import MAX_BYTES, Batch, CaseRow, Placed, Tried
from opforge.judge.contract import Hearing
from opforge.judge.custom import CustomOperators
from opforge.judge.draws import judge_draws
from opforge.judge.peaks import Peaks
from opforge.judge.properties import BY_PACKET
from opforge.judge.racing import Racing
from opforge.judge.reference import Exact, end_without_device
from opforge.judge.replies import FORGED, replies_of, results_end
from opforge.judge.rooms import Rooms
from opforge.judge.verdict import FAULT, REJECTED, Finding, Outcome
from opforge.judge.workers import MOST_LIMITS, DeathError, KernelWorker, WorkerConfig
from opforge.ops import Form, Operator, table
from opforge.sandbox.client import Spawner
from opforge.sandbox.wire import Channel

_MAX_DEATHS = 3
"""After this many dead processes on one operator, the rest of its cases are not run."""
_FIRST_BATCH_CASES = 2
"""Cases in a batch for a kernel of unknown speed.

The time of a request is limited, and each case is many calls.
"""
_TARGET_BATCH_S = 20.0
_PATIENCE_S = 10.0
"""Time limit of a kernel that has hit the ordinary limit before."""
_MIN_ALLOWED_SLOWDOWN = 20.0
"""A call may take at least this many times as long as ATen."""
_MAX_CASES_FOR_PARTS = 4
_DERIVED = 3
"""Number of cases per operator that are run for their gradients."""
_KEPT_BYTES = 1 << 30
"""GPU memory above this is released after each batch, for other judges and workers."""
_FORGED = Finding(Outcome.CONTRACT, FORGED)
_EARLY_BATCH_SIZES = (4, 24)
"""Sizes of the first batches of a job that ends with its first rejection.

Most mutants fail in the first batch.
"""

_PATIENCE = 4
"""Factor on ATen's time budget where it runs alone.

It must reach the variant on which a judge was lost.
"""


def prepare() -> None:
    """Do in the fork server what each judge would otherwise repeat."""
    bypass.packets_by_stem()
    np.random  # noqa: B018  # numpy imports it on first access


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Judge jobs until the main process hangs up."""
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    blobs = {name: open_blob(Path(path)) for name, path in config["blobs"].items()}
    workers = WorkerConfig(config["device"], config["timeout_s"], config["memory_bytes"])
    rooms = Rooms(spawner, **config["confine"]) if config.get("confine") else None
    peaks = Peaks.from_json(config["peaks"]) if config.get("peaks") else None
    judge = Judge(channel, spawner, workers, blobs, rooms, peaks)
    while True:
        judge.job(channel.receive())
        channel.send({"done": True})


@dataclass
class _JudgedOperator:
    facts: Operator
    required: bool
    kernel: dict[str, Any]
    cases: int = 1
    """Number of its cases in this job."""
    seen: int = 0
    reference: Reference | None = None
    """Answers in ATen's place, for a user's own operator."""
    until_rejected: bool = False
    """Whether the job ends with the first rejection."""
    rejected: bool = False
    deaths: int = 0
    derived: int = 0
    """Number of its cases whose gradients were judged."""
    tried: Tried = field(default_factory=Tried)
    lingered: bool = False
    """Whether the kernel was checked for results that come late."""

    @property
    def settled(self) -> bool:
        return self.until_rejected and self.rejected


class Judge:
    """Judges one job at a time, with at most one worker for the kernel and one for ATen to race."""

    def __init__(
        self,
        channel: Channel,
        spawner: Spawner,
        workers: WorkerConfig,
        blobs: Mapping[str, Bytes],
        rooms: Rooms | None = None,
        peaks: Peaks | None = None,
    ) -> None:
        self._channel = channel
        self._spawner = spawner
        self._config = workers
        self._device = torch.device(workers.device)
        self._blobs = blobs
        self._rooms = rooms
        self._racing = Racing(spawner, workers, rooms, peaks)
        self._buffer: Bytes = np.zeros(MAX_BYTES + (1 << 20), np.uint8)
        self._worker: KernelWorker | None = None
        self._custom = CustomOperators(spawner, workers, rooms, blobs, self._buffer)
        self._loaded: dict[str, Any] = {}
        self._registrations_checked = False
        self._broken: Finding | None = None
        self._max_batch_cases = _FIRST_BATCH_CASES
        """Maximum cases in a batch, from the time that the last batch took."""
        self._allow_large_variants = True
        """Whether the current job's kernel gets large variants; it has answered them so far."""
        self._timeouts = 0
        """Number of time limits that the current job's kernel has used up."""

    def job(self, job: dict[str, Any]) -> None:
        """Judge one kernel on the cases of the operators that it serves."""
        broken = job["kernel"].get("broken")
        self._broken = Finding(Outcome.ERROR, broken) if broken else None
        self._plain = frozenset(job.get("plain", ()))
        self._timeouts, self._max_batch_cases, self._allow_large_variants = 0, _FIRST_BATCH_CASES, True
        cases_of = [[CaseRow.from_wire(row) for row in part["cases"]] for part in job["ops"]]
        if job.get("aten_alone"):
            self._run_aten_alone(job, cases_of[0][0])
            return
        untimed = all(case.phase is not Phase.PERFORMANCE for cases in cases_of for case in cases)
        kernel = {**job["kernel"], "forbidden": self._forbidden_operators(job, cases_of), "untimed": untimed}
        try:
            for part, cases in zip(job["ops"], cases_of, strict=True):
                facts, reference = self._facts(job, part["op"], cases)
                until_rejected = job.get("until") == "rejected"
                op = _JudgedOperator(
                    facts, part["required"], kernel, len(cases), reference=reference, until_rejected=until_rejected
                )
                self._judge(op, cases, job["batch"])
        finally:
            if "mutant" not in job["kernel"]:  # mutants are our own code and may share a process
                self._end_worker()
                if self._rooms is not None:
                    self._rooms.clear()

    def _run_aten_alone(self, job: dict[str, Any], case: CaseRow) -> None:
        """Run one case in all its variants with ATen alone, in float64 and backward too.

        The caller sees whether this process survives.
        """
        number, count = job["aten_alone"]
        facts, reference = self._facts(job, job["ops"][0]["op"], [case])
        op = _JudgedOperator(facts, True, job["kernel"], count, number, reference)
        batch, _refused = self._fill_batch(op, deque([case]), 1, _PATIENCE * forms.ATEN_BUDGET_S)
        for placed in batch.placed:
            with contextlib.suppress(Exception):  # ATen may raise
                exact = Exact(placed.call)
                _ = exact.tensors, exact.spread(), exact.perturbed(torch.finfo(torch.float32).eps, 1)
                placed.call.gradients().run()

    def _facts(self, job: dict[str, Any], name: str, cases: list[CaseRow]) -> tuple[Operator, Reference | None]:
        """Return the facts of an operator and, for a user's own operator, its reference."""
        if (described := job["kernel"].get("reference")) is not None:
            return self._custom.facts(described, name, cases)
        facts = table().get(name)
        if facts is None:
            raise ValueError(f"the job names an unknown operator {name!r}")
        return facts, None

    def _forbidden_operators(self, job: dict[str, Any], cases_of: list[list[CaseRow]]) -> list[str]:
        """Return the operators the job's kernel may not call; they are trapped before it loads."""
        if job["kernel"]["file"] is None or job.get("allow_fallback"):
            return []
        served = map(table().get, job.get("serves") or [part["op"] for part in job["ops"]])
        names = bypass.forbidden(op for op in served if op is not None)
        for part, cases in zip(job["ops"], cases_of, strict=True):
            if cases and (op := table().get(part["op"])) is not None and op.composite:
                names += self._parts(op, cases)
        return list(dict.fromkeys(names))

    def _parts(self, op: Operator, cases: list[CaseRow]) -> list[str]:
        """Return the operators a composite one only wraps, by its first case that can be built."""
        for case in cases[:_MAX_CASES_FOR_PARTS]:
            batch = Batch(op, self._device, self._config.in_bytes, self._blobs, self._buffer)
            try:
                placed = batch.add(case)
            except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
                end_without_device(error)
                continue
            return [] if placed is None else bypass.only_part(op, placed.call)
        return []

    def _judge(self, op: _JudgedOperator, cases: list[CaseRow], batch_size: int) -> None:
        waiting = deque(cases)
        sizes = iter(_EARLY_BATCH_SIZES if op.until_rejected else ())
        while waiting and not op.settled:
            if (op.deaths >= _MAX_DEATHS or self._timeouts >= MOST_LIMITS) and self._broken is None:
                self._emit(op, [(case, self._not_run(op)) for case in waiting])
                return
            worker = self._ready_worker(op.kernel)
            if worker is None or self._broken is not None:
                self._emit(op, [(case, self._broken or self._not_run(op)) for case in waiting])
                return
            size = min(batch_size, next(sizes, batch_size), self._max_batch_cases)
            batch, refused = self._fill_batch(op, waiting, size)
            self._emit(op, refused)
            if batch.placed:
                self._run(op, worker, batch, waiting)

    def _fill_batch(
        self, op: _JudgedOperator, waiting: deque[CaseRow], batch_size: int, budget_s: float = forms.ATEN_BUDGET_S
    ) -> tuple[Batch, list[tuple[CaseRow, Finding]]]:
        batch = Batch(op.facts, self._device, self._config.in_bytes, self._blobs, self._buffer, op.reference, op.tried)
        refused: list[tuple[CaseRow, Finding]] = []
        taken = 0
        while waiting and taken < batch_size and not batch.full:
            case = waiting[0]
            try:
                hostile = case.id not in self._plain
                if not forms.place(
                    batch,
                    op.facts,
                    case,
                    op.seen,
                    op.cases,
                    hostile=hostile,
                    large_too=self._allow_large_variants,
                    budget_s=budget_s,
                ):
                    break
            except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
                end_without_device(error)
                refused.append((case, Finding(Outcome.UNSUPPORTED, f"the case cannot be made here: {error}")))
            waiting.popleft()
            taken += 1
            op.seen += 1
        return batch, refused

    def _run(self, op: _JudgedOperator, worker: KernelWorker, batch: Batch, waiting: deque[CaseRow]) -> None:
        batch.copy_to(worker.bytes)
        try:
            worker.begin(self._request(op, batch))
            began = time.monotonic()
            reply = worker.answer(timeout_s=self._limit_s(batch), cases=len(batch.placed))
        except DeathError as death:
            self._death(op, batch, death, waiting)
            return
        case_s = (time.monotonic() - began) / len({id(p.case) for p in batch.placed})
        self._max_batch_cases = max(1, int(_TARGET_BATCH_S / max(case_s, 1e-3)))
        replies = replies_of(reply, len(batch.placed))
        if replies is None:
            self._end_worker()
            self._emit(op, [(p.case, _FORGED) for p in batch.placed if not p.form])
            return
        raised = next((index for index, case_reply in enumerate(replies) if "raised" in case_reply), None)
        try:  # first: a kernel beyond its process limit may raise for that reason
            worker.look_after(raised or 0, at_once=True)
        except DeathError as death:
            self._death(op, batch, death, waiting)
            return
        findings = self._hear(op, worker, batch, replies)
        if any(finding.passed for _, finding in findings) and (breach := self._breach(worker, reply)):
            findings = [(case, breach if finding.passed else finding) for case, finding in findings]
        if self._worker is not None:  # else lost while timing or drawing
            worker.release(batch.used)
        if self._device.type == "cuda" and torch.cuda.memory_reserved() > _KEPT_BYTES:
            torch.cuda.empty_cache()
        self._emit(op, findings)

    def _limit_s(self, batch: Batch) -> float:
        """Return the time limit of a call: less after a kernel hung, more where ATen is slow."""
        patience_s = min(self._config.timeout_s, _PATIENCE_S) if self._timeouts else self._config.timeout_s
        return max(patience_s, _MIN_ALLOWED_SLOWDOWN * batch.aten_s)

    def _not_run(self, op: _JudgedOperator) -> Finding:
        if self._timeouts >= MOST_LIMITS:
            return Finding(
                Outcome.TIMED_OUT, f"not run: the kernel ran into its time limit {self._timeouts} times before"
            )
        return Finding(Outcome.CRASHED, f"not run: the kernel's process was lost {op.deaths} times on {op.facts.name}")

    def _request(self, op: _JudgedOperator, batch: Batch) -> dict[str, Any]:
        cases = [p.request() for p in batch.placed]
        request: dict[str, Any] = {"do": "call", "op": op.facts.name, "random": op.facts.random, "cases": cases}
        listed = next((i for i, p in enumerate(batch.placed) if p.form == "again"), None)
        if op.kernel["forbidden"] and listed is not None:
            cases[listed]["list"] = True
        return request

    def _breach(self, worker: KernelWorker, reply: dict[str, Any]) -> Finding | None:
        """Return what the kernel did, beside its answers, that invalidates all of them."""
        if tampered := reply.get("tampered"):
            return _tampering(tampered)
        if self._worker is None:  # lost while timing or drawing
            return None
        if self._loaded.get("mutant") is None and (strays := worker.orphans()):
            return Finding(Outcome.CHEATED, f"left {strays} process(es) running that it had started and cut loose")
        return _foreign_code(worker, self._loaded) or self._check_registrations(worker)

    def _check_registrations(self, worker: KernelWorker) -> Finding | None:
        """Check once everything that is registered under ``aten``.

        This is slow, so it is done only for kernels that would pass.
        """
        if self._registrations_checked:
            return None
        self._registrations_checked = True
        try:
            reply = worker.ask({"do": "registrations"})
        except DeathError as death:
            self._worker = None
            return Finding(death.outcome, f"when it was looked at what it has registered: {death}")
        if not isinstance(reply, dict):
            return _FORGED
        return _tampering(reply["tampered"]) if reply.get("tampered") else None

    def _death(self, op: _JudgedOperator, batch: Batch, death: DeathError, waiting: deque[CaseRow]) -> None:
        """Give the case that was running its verdict, and put the others of its batch back."""
        self._worker = None
        op.deaths += 1
        self._timeouts += death.time_limits
        placed = batch.placed[min(death.index, len(batch.placed) - 1)]
        if placed.form in LARGE_FORMS and death.outcome is Outcome.TIMED_OUT and self._allow_large_variants:
            self._allow_large_variants, op.deaths = False, op.deaths - 1
            waiting.extendleft(reversed([p.case for p in batch.placed if not p.form]))  # without large ones
            return
        victim = placed.case
        unfinished = [p.case for p in batch.placed if not p.form and p.case is not victim]
        waiting.extendleft(reversed(unfinished))
        variant = f"{forms.words(placed.form)}: " if placed.form else ""
        self._emit(op, [(victim, Finding(death.outcome, f"{variant}{death}"))])

    def _hear(
        self, op: _JudgedOperator, worker: KernelWorker, batch: Batch, replies: list[dict[str, Any]]
    ) -> list[tuple[CaseRow, Finding]]:
        touched = batch.touched(worker.bytes)
        results = bytearray(worker.bytes[self._config.in_bytes : results_end(replies, self._config)])
        groups: dict[int, list[tuple[Placed, Finding]]] = {}
        first: Hearing | None = None
        shown: dict[str, str] = {}
        for placed, reply, inputs in zip(batch.placed, replies, touched, strict=True):
            hearing = Hearing(
                op.facts, op.required, placed.expect, placed.call, placed.answer, reply, results, self._config.in_bytes,
                inputs, measure=not placed.form and "mutant" not in op.kernel,
            )  # fmt: skip
            finding = hearing.finding()
            if not placed.form:
                first = hearing
                finding = self._extra_checks(op, worker, batch, placed, hearing, finding)
            elif finding.outcome is Outcome.WRONG and first is not None and batch.at_fault(first.aten, placed):
                continue
            elif placed.form in forms.REPLAYS and finding.outcome is Outcome.WRONG and first is not None:
                finding = _stale(first, hearing) or finding
            elif placed.form == "again" and finding.passed and "calls" in reply:
                finding = replace(finding, figures={"calls": _counted(reply["calls"])})
            if "mutant" in op.kernel:
                shown[placed.case.id] = str(reply.get("mutant", ""))
            groups.setdefault(id(placed.case), []).append((placed, finding))
            if op.until_rejected and finding.outcome in REJECTED:
                break
        settled = [(group[0][0].case, forms.settle(group)) for group in groups.values()]
        if "mutant" in op.kernel:
            return [(c, replace(f, figures={**f.figures, "mutant": shown[c.id]})) for c, f in settled]
        return [(case, self._noted(batch, case, finding)) for case, finding in settled]

    def _noted(self, batch: Batch, case: CaseRow, finding: Finding) -> Finding:
        """Add notes on what was not judged because ATen is wrong, slow or dies there."""
        notes = [
            f"not judged {forms.words(name)}: {batch.authority}'s own answer is another one there, {batch.fault}"
            for name in batch.defects.get(case.id, ())
        ]
        if case.id in batch.slow:
            notes.append(f"judged in fewer variants: {batch.authority} takes {batch.slow[case.id]:.1f} s for a call")
        if case.id in self._plain:
            notes.append(f"judged as it stands only: ATen's own process dies on a hostile form of this case, {FAULT}")
        return replace(finding, notes=(*finding.notes, *notes)) if notes else finding

    def _extra_checks(
        self,
        op: _JudgedOperator,
        worker: KernelWorker,
        batch: Batch,
        placed: Placed,
        hearing: Hearing,
        finding: Finding,
    ) -> Finding:
        """Check what needs more than one call: late results, gradients, random draws, times."""
        foreign = "mutant" not in op.kernel
        timed = foreign and placed.case.phase is Phase.PERFORMANCE
        if foreign and finding.outcome is Outcome.WRONG and not op.lingered and self._worker is not None:
            op.lingered = True
            return self._or_death(further.lingering, worker, self._config, placed, hearing) or finding
        if foreign and finding.passed and self._worker is not None and _differentiable(op, placed):
            finding = self._or_death(self._judge_gradients, op, worker, placed) or finding
        drew = hearing.aten.drew
        if not finding.passed or not (drew or timed):
            return finding
        if self._worker is None:
            return Finding(Outcome.CRASHED, "not looked at further: the kernel's process was lost on a case before it")
        if drew:
            draw_arguments = (worker, op.facts, placed, hearing, hearing.reply, self._config, finding)
            finding = self._or_death(judge_draws, *draw_arguments) or finding
        if finding.passed and timed:
            race = functools.partial(
                self._racing.race,
                required=op.required,
                reference=op.reference,
                apart=functools.partial(self._apart, op, placed),
            )
            with self._alone(worker):
                finding = self._or_death(race, op.facts, worker, batch, placed, finding) or finding
        return finding

    def _apart(self, op: _JudgedOperator, placed: Placed, renewal: int) -> Finding | None:
        """Judge the kernel on the contents of a timed call, in a new process and untimed."""
        kernel = op.kernel
        room = self._rooms.reference(kernel["file"], kernel.get("library")) if self._rooms is not None else None
        worker = KernelWorker(self._spawner, self._config, room)
        return further.asked_apart(worker, self._config, kernel, op.facts, placed, renewal, required=op.required)

    @contextlib.contextmanager
    def _alone(self, worker: KernelWorker) -> Iterator[None]:
        """Wait for exclusive use of the device, then for the other judges."""
        self._announce_and_wait("ready", worker)
        yield
        self._announce_and_wait("raced", worker)

    def _announce_and_wait(self, state: str, worker: KernelWorker) -> None:
        worker.pause()
        self._channel.send({state: True})
        self._channel.receive()
        worker.resume()

    def _judge_gradients(self, op: _JudgedOperator, worker: KernelWorker, placed: Placed) -> Finding | None:
        """Judge gradients through the operator while the kernel is installed in ATen's place."""
        call = placed.call.gradients()
        aten = call.run()
        if aten.raised is not None:  # no derivative, or not of these inputs
            return None
        op.derived += 1
        return further.gradients(worker, self._config, op.facts, placed, call, aten)

    def _or_death(self, check: Callable[..., Finding | None], *args: Any) -> Finding | None:
        """Run a further check on a worker; if the worker dies, that is the verdict."""
        try:
            return check(*args)
        except DeathError as death:
            self._end_worker()
            self._timeouts += death.time_limits
            return Finding(death.outcome, str(death))

    def _ready_worker(self, kernel: dict[str, Any]) -> KernelWorker | None:
        """Return a worker with the kernel loaded; None, with the reason kept, if loading fails."""
        if self._broken is not None or (self._worker is not None and self._loaded == kernel):
            return self._worker
        room = (
            self._rooms.for_kernel(kernel["file"], kernel.get("library"))
            if self._rooms is not None and self._worker is None
            else None
        )
        worker = self._worker or KernelWorker(self._spawner, self._config, room)
        self._worker = None
        try:
            reply = worker.ask({"do": "load", "kernel": kernel}, timeout_s=max(LOAD_LIMIT_S, self._config.timeout_s))
        except DeathError as death:
            self._broken = Finding(death.outcome, f"while loading: {death}")
            return None
        if not isinstance(reply, dict):
            worker.close()
            self._broken = Finding(Outcome.CONTRACT, f"while loading: {FORGED}")
            return None
        if (refusal := _refusal(reply) or _foreign_code(worker, kernel)) is not None:
            worker.close()
            self._broken = refusal
            return None
        self._worker, self._loaded, self._registrations_checked = worker, kernel, False
        return worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _emit(self, op: _JudgedOperator, findings: list[tuple[CaseRow, Finding]]) -> None:
        op.rejected |= any(finding.outcome in REJECTED for _, finding in findings)
        if findings:
            rows = [{"id": case.id, "phase": case.phase.value, **finding.row()} for case, finding in findings]
            self._channel.send({"op": op.facts.name, "verdicts": rows})


def _differentiable(judged: _JudgedOperator, placed: Placed) -> bool:
    """Whether the gradients of a case can be judged; ATen decides whether there are any."""
    op = judged.facts
    if judged.derived >= _DERIVED:
        return False
    if judged.kernel["file"] is not None and not judged.kernel["forbidden"]:
        return False  # a kernel that falls back on the operator would call itself once installed
    if op.packet in BY_PACKET:
        return False  # a different right answer has different gradients
    plain = op.form is Form.FUNCTIONAL and not op.composite and not op.random and "_backward" not in op.base
    floats = any(row[2][0] in "fbc" and row[2] != "b8" and row[6] is None for row in placed.inputs)
    large = sum(row[1] for row in placed.inputs) > forms.LARGE_BYTES
    return plain and floats and not large and placed.case.expect is Expect.RETURNS


def _stale(first: Hearing, replayed: Hearing) -> Finding | None:
    """Return the verdict on a kernel that answers for the earlier contents of its memory."""
    is_user_call = isinstance(first.call, AskedCall)  # it returns all inputs, and they rightly hold the new contents
    call = replace(first.call, own=False) if is_user_call else first.call
    earlier = replace(replayed, call=call, aten=first.aten, notes=[], values=[], measure=False)
    if not earlier.finding().passed:
        return None
    return Finding(Outcome.CHEATED, "gave the answer to earlier contents of the same memory: a replayed result")


def _counted(calls: Any) -> dict[str, int]:
    """Return the counts of a kernel's own calls, sanitised: its process is untrusted."""
    if not isinstance(calls, dict):
        return {}
    return {str(name)[:80]: count for name, count in list(calls.items())[:100] if isinstance(count, int)}


def _foreign_code(worker: KernelWorker, kernel: dict[str, Any]) -> Finding | None:
    """Return the verdict on a kernel whose libraries call ATen's code past the dispatcher."""
    objection = worker.objection(kernel["forbidden"]) if kernel["forbidden"] else None
    return None if objection is None else Finding(Outcome.CHEATED, objection)


def _tampering(changes: Any, when: str = "") -> Finding:
    """Return the verdict on a kernel that has changed the process it runs in."""
    listed = changes if isinstance(changes, list) else [changes]
    return Finding(Outcome.CHEATED, f"{when}tampered with its process: {'; '.join(map(str, listed))}")


def _refusal(reply: dict[str, Any]) -> Finding | None:
    """Return why a kernel is rejected when it is loaded, or cannot be loaded."""
    if "tried" in reply:
        return Finding(Outcome.CHEATED, f"while loading: {reply['tried']}")
    if "error" in reply:
        return Finding(Outcome.ERROR, f"cannot be loaded: {reply['error']}")
    if tampered := reply.get("tampered"):
        return _tampering(tampered, "while loading, ")
    if changes := reply.get("state"):
        return Finding(Outcome.CONTRACT, f"while loading, changed global state: {'; '.join(map(str, changes))}")
    return None
