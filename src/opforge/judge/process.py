"""Judge process: takes jobs (a kernel and its cases) from the main process, returns verdicts."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Expect, Phase
from opforge.cases.case_files import open_blob
from opforge.cases.tensors import Bytes
from opforge.cases.variant_shapes import LARGE_VARIANT_NAMES
from opforge.errors import CaseSyntaxError
from opforge.judge import extra_checks, forbidden_calls, variants
from opforge.judge.batch import MAX_INPUT_BYTES, Batch, BatchEntry, CaseRow, TriedVariants
from opforge.judge.compare.contract import CaseCheck
from opforge.judge.facts import facts_of
from opforge.judge.kernel_worker import MAX_TIMEOUTS, KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.random.sampling import judge_draws
from opforge.judge.reference.aten import Float64Answers, abort_if_gpu_lost
from opforge.judge.reference.custom_operators import CustomOperators
from opforge.judge.reference.user import UserCall, UserReference
from opforge.judge.roofline.peaks import Peaks
from opforge.judge.timing.case_timer import CaseTimer
from opforge.judge.verdict import PYTORCH_DEFECT, REJECTING_KINDS, Verdict, VerdictKind
from opforge.judge.worker_folders import WorkerFolders
from opforge.ops import Operator, SchemaKind, table
from opforge.procs.channel import Channel
from opforge.sandbox.guest.global_state import start_device
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import (
    CallReply,
    CallsReply,
    IntegrityReply,
    LoadReply,
    MalformedReplyError,
    failed_together,
    results_end,
)
from opforge.sandbox.host.request import CallRequest, LoadRequest

_MAX_DEATHS = 3
"""After this many dead processes on one operator, the rest of its cases are not run."""
_FIRST_BATCH_CASES = 2
"""Cases in a batch for a kernel of unknown speed.

The time of a request is limited, and each case is many calls.
"""
_TARGET_BATCH_S = 20.0
_REDUCED_TIMEOUT_S = 10.0
"""Time limit of a kernel that has hit the ordinary limit before."""
_MIN_ALLOWED_SLOWDOWN = 20.0
"""A call may take at least this many times as long as ATen."""
_MAX_CASES_FOR_PARTS = 4
_MAX_REASON_CHARS = 300
_MAX_GRADIENT_CASES = 3
"""Number of cases per operator that are run for their gradients."""
_MAX_CACHED_GPU_BYTES = 1 << 30
"""GPU memory above this is released after each batch, for other judges and workers."""
_EARLY_BATCH_SIZES = (4, 24)
"""Sizes of the first batches of a job that ends with its first rejection.

Most mutants fail in the first batch.
"""

_ATEN_ALONE_BUDGET_FACTOR = 4
"""Factor on ATen's time budget where it runs alone.

It must reach the variant on which a judge was lost.
"""


def prepare() -> None:
    """Do in the fork server what each judge would otherwise repeat."""
    forbidden_calls.packets_by_stem()
    np.random  # noqa: B018  # numpy imports it on first access


def serve(config: dict[str, Any], fds: list[int]) -> None:
    """Judge jobs until the main process hangs up."""
    warnings.simplefilter("ignore")  # ATen's warnings are not about the kernel
    channel, spawner = Channel.from_fd(fds[0]), Spawner.from_fd(fds[1])
    blobs = {name: open_blob(Path(path)) for name, path in config["blobs"].items()}
    workers = WorkerConfig(config["device"], config["timeout_s"], config["memory_bytes"], race_s=config["race_s"])
    worker_folders = WorkerFolders(spawner, **config["confine"]) if config.get("confine") else None
    peaks = Peaks.from_json(config["peaks"]) if config.get("peaks") else None
    judge = Judge(channel, spawner, workers, blobs, worker_folders, peaks, native=config["native"])
    while True:
        judge.judge_job(channel.receive())
        channel.send({"done": True})


@dataclass
class _JudgedOperator:
    operator: Operator
    required: bool
    kernel: dict[str, Any]
    case_count: int = 1
    """Number of its cases in this job."""
    cases_seen: int = 0
    reference: UserReference | None = None
    """The reference of a user's own operator; None for ATen's operators."""
    until_rejected: bool = False
    """Whether the job ends with the first rejection."""
    rejected: bool = False
    deaths: int = 0
    gradient_cases: int = 0
    """Number of its cases whose gradients were judged."""
    tried: TriedVariants = field(default_factory=TriedVariants)
    checked_for_late_results: bool = False
    """Whether the kernel was checked for results that come late."""

    @property
    def is_settled(self) -> bool:
        return self.until_rejected and self.rejected


class Judge:
    """Judges one job at a time, with at most one worker for the kernel and one for ATen to race."""

    def __init__(
        self,
        channel: Channel,
        spawner: Spawner,
        config: WorkerConfig,
        blobs: Mapping[str, Bytes],
        worker_folders: WorkerFolders | None = None,
        peaks: Peaks | None = None,
        *,
        native: bool = False,
    ) -> None:
        """Create a judge; with ``native``, kernels are called through their operators' native slots."""
        self._native = native
        self._channel = channel
        self._spawner = spawner
        self._config = config
        self._device = torch.device(config.device)
        self._blobs = blobs
        self._worker_folders = worker_folders
        self._case_timer = CaseTimer(spawner, config, worker_folders, peaks)
        self._buffer: Bytes = np.zeros(MAX_INPUT_BYTES + (1 << 20), np.uint8)
        self._worker: KernelWorker | None = None
        self._custom = CustomOperators(spawner, config, worker_folders, blobs, self._buffer)
        self._loaded: dict[str, Any] = {}
        self._registrations_checked = False
        self._load_failure: Verdict | None = None
        self._max_batch_cases = _FIRST_BATCH_CASES
        """Maximum cases in a batch, from the time that the last batch took."""
        self._allow_large_variants = True
        """Whether the current job's kernel gets large variants; it has answered them so far."""
        self._timeouts = 0
        """Number of time limits that the current job's kernel has used up."""

    def judge_job(self, job: dict[str, Any]) -> None:
        """Judge one kernel on the cases of the operators that it serves."""
        broken = job["kernel"].get("broken")
        self._load_failure = Verdict(VerdictKind.ERROR, broken) if broken else None
        self._unvaried_case_ids = frozenset(job.get("plain", ()))
        self._timeouts, self._max_batch_cases, self._allow_large_variants = 0, _FIRST_BATCH_CASES, True
        cases_of = [[CaseRow.from_wire(row) for row in part["cases"]] for part in job["ops"]]
        if job.get("aten_alone"):
            self._run_aten_alone(job, cases_of[0][0])
            return
        untimed = all(case.phase is not Phase.PERFORMANCE for cases in cases_of for case in cases)
        kernel = {**job["kernel"], "forbidden": self._forbidden_operators(job, cases_of), "untimed": untimed}
        if self._native and kernel["file"] is not None and not {"mutant", "reference"} & kernel.keys():
            kernel["native"] = [part["op"] for part in job["ops"]]
        try:
            for part, cases in zip(job["ops"], cases_of, strict=True):
                facts, reference = self._operator_and_reference(job, part["op"], cases)
                until_rejected = job.get("until") == "rejected"
                op = _JudgedOperator(
                    facts, part["required"], kernel, len(cases), reference=reference, until_rejected=until_rejected
                )
                self._judge(op, cases, job["batch"])
        finally:
            if not _is_own_code(job["kernel"]):
                self._end_job_process()

    def _run_aten_alone(self, job: dict[str, Any], case: CaseRow) -> None:
        """Run one case in all its variants with ATen alone, in float64 and backward too.

        The caller sees whether this process survives.
        """
        number, count = job["aten_alone"]
        facts, reference = self._operator_and_reference(job, job["ops"][0]["op"], [case])
        op = _JudgedOperator(facts, True, job["kernel"], count, number, reference)
        batch, _refused = self._fill_batch(
            op, deque([case]), 1, _ATEN_ALONE_BUDGET_FACTOR * variants.ATEN_TIME_BUDGET_S
        )
        for entry in batch.entries:
            with contextlib.suppress(Exception):  # ATen may raise
                exact = Float64Answers(entry.call)
                _ = exact.tensors, exact.with_gaps(), list(exact.perturbed((1,), torch.finfo(torch.float32).eps))
                entry.call.gradient_call().run()

    def _operator_and_reference(
        self, job: dict[str, Any], name: str, cases: list[CaseRow]
    ) -> tuple[Operator, UserReference | None]:
        """Return the facts of an operator and, for a user's own operator, its reference."""
        if (described := job["kernel"].get("reference")) is not None:
            return self._custom.operator_and_reference(described, name, cases)
        facts = table().get(name)
        if facts is None:
            raise ValueError(f"the job names an unknown operator {name!r}")
        return facts, None

    def _forbidden_operators(self, job: dict[str, Any], cases_of: list[list[CaseRow]]) -> list[str]:
        """Return the operators the job's kernel may not call; they are trapped before it loads."""
        if job["kernel"]["file"] is None or job.get("allow_fallback"):
            return []
        served = map(table().get, job.get("serves") or [part["op"] for part in job["ops"]])
        names = forbidden_calls.forbidden_operators(op for op in served if op is not None)
        for part, cases in zip(job["ops"], cases_of, strict=True):
            if cases and (op := table().get(part["op"])) is not None and op.composite:
                names += self._wrapped_operators(op, cases)
        return list(dict.fromkeys(names))

    def _wrapped_operators(self, op: Operator, cases: list[CaseRow]) -> list[str]:
        """Return the operators a composite one only wraps, by its first case that can be built."""
        for case in cases[:_MAX_CASES_FOR_PARTS]:
            batch = Batch(op, self._device, self._config.input_bytes, self._blobs, self._buffer)
            try:
                entry = batch.add(case)
            except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
                abort_if_gpu_lost(error)
                continue
            return [] if entry is None else forbidden_calls.wrapped_operators(op, entry.call)
        return []

    def _judge(self, op: _JudgedOperator, cases: list[CaseRow], batch_size: int) -> None:
        waiting = deque(cases)
        sizes = iter(_EARLY_BATCH_SIZES if op.until_rejected else ())
        while waiting and not op.is_settled:
            if (op.deaths >= _MAX_DEATHS or self._timeouts >= MAX_TIMEOUTS) and self._load_failure is None:
                self._send_verdicts(op, [(case, self._not_run(op)) for case in waiting])
                return
            worker = self._ready_worker(op.kernel)
            if worker is None or self._load_failure is not None:
                self._send_verdicts(op, [(case, self._load_failure or self._not_run(op)) for case in waiting])
                return
            size = min(batch_size, next(sizes, batch_size), self._max_batch_cases)
            batch, refused = self._fill_batch(op, waiting, size)
            self._send_verdicts(op, refused)
            if batch.entries:
                self._run(op, worker, batch, waiting)

    def _fill_batch(
        self,
        op: _JudgedOperator,
        waiting: deque[CaseRow],
        batch_size: int,
        budget_s: float = variants.ATEN_TIME_BUDGET_S,
    ) -> tuple[Batch, list[tuple[CaseRow, Verdict]]]:
        batch = Batch(
            op.operator, self._device, self._config.input_bytes, self._blobs, self._buffer, op.reference, op.tried
        )
        refused: list[tuple[CaseRow, Verdict]] = []
        taken = 0
        while waiting and taken < batch_size and not batch.is_full:
            case = waiting[0]
            try:
                hostile = case.id not in self._unvaried_case_ids
                if not variants.add_with_variants(
                    batch,
                    op.operator,
                    case,
                    op.cases_seen,
                    op.case_count,
                    hostile=hostile,
                    allow_large_variants=self._allow_large_variants,
                    budget_s=budget_s,
                ):
                    break
            except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
                abort_if_gpu_lost(error)
                refused.append((case, Verdict(VerdictKind.UNSUPPORTED, f"the case cannot be made here: {error}")))
            waiting.popleft()
            taken += 1
            op.cases_seen += 1
        return batch, refused

    def _run(
        self,
        op: _JudgedOperator,
        worker: KernelWorker,
        batch: Batch,
        waiting: deque[CaseRow],
        failed_before: str = "",
    ) -> None:
        """Have a batch answered, and judge it; its calls made together have failed with ``failed_before``, if given."""
        batch.copy_to(worker.arena_view)
        try:
            worker.begin(self._request(op, batch, together=not failed_before))
            began = time.monotonic()
            answer = worker.answer(timeout_s=self._limit_s(batch), cases=len(batch.entries))
        except WorkerDiedError as death:
            self._handle_death(op, batch, death, waiting)
            return
        if not failed_before and (failure := failed_together(answer)):
            self._run_one_by_one(op, batch, waiting, failure)
            return
        case_s = (time.monotonic() - began) / len({id(p.case) for p in batch.entries})
        self._max_batch_cases = max(1, int(_TARGET_BATCH_S / max(case_s, 1e-3)))
        try:
            reply = CallsReply.from_wire(answer, len(batch.entries), self._config.results_region)
        except MalformedReplyError as error:
            self._end_worker()
            verdict = Verdict(VerdictKind.CONTRACT, str(error))
            self._send_verdicts(op, [(p.case, verdict) for p in batch.entries if not p.variant])
            return
        raised = next((index for index, call in enumerate(reply.calls) if call.raised is not None), None)
        try:  # first: a kernel beyond its process limit may raise for that reason
            worker.check_limits(raised or 0, force=True)
        except WorkerDiedError as death:
            self._handle_death(op, batch, death, waiting)
            return
        verdicts = self._check_replies(op, worker, batch, reply.calls)
        blamed = {*REJECTING_KINDS, VerdictKind.ERROR}
        if failed_before and not any(verdict.kind in blamed for _, verdict in verdicts):
            reason = f"a call failed on the GPU when {len(batch.entries)} were made in a row: {failed_before}"
            failed = Verdict(VerdictKind.ERROR, reason)
            verdicts = [(case, failed if verdict.passed else verdict) for case, verdict in verdicts]
        if any(verdict.passed for _, verdict in verdicts) and (breach := self._breach(worker, reply.tampered)):
            verdicts = [(case, breach if verdict.passed else verdict) for case, verdict in verdicts]
        if self._worker is not None:  # else lost while timing or drawing
            region = self._config.results_region
            worker.release_arena(batch.used_bytes + results_end(reply.calls, region) - region.start)
        if self._device.type == "cuda" and torch.cuda.memory_reserved() > _MAX_CACHED_GPU_BYTES:
            torch.cuda.empty_cache()
        self._send_verdicts(op, verdicts)

    def _run_one_by_one(self, op: _JudgedOperator, batch: Batch, waiting: deque[CaseRow], failure: str) -> None:
        """Run a batch again in a new process, waiting for each call: one failed, and it is not known which."""
        self._end_worker()
        worker = self._ready_worker(op.kernel)
        if worker is None:
            cases = [p.case for p in batch.entries if not p.variant]
            self._send_verdicts(op, [(case, self._load_failure or self._not_run(op)) for case in cases])
        else:
            self._run(op, worker, batch, waiting, failure)

    def _limit_s(self, batch: Batch) -> float:
        """Return the time limit of a call: less after a kernel hung, more where ATen is slow."""
        patience_s = min(self._config.timeout_s, _REDUCED_TIMEOUT_S) if self._timeouts else self._config.timeout_s
        return max(patience_s, _MIN_ALLOWED_SLOWDOWN * batch.aten_s)

    def _not_run(self, op: _JudgedOperator) -> Verdict:
        if self._timeouts >= MAX_TIMEOUTS:
            return Verdict(
                VerdictKind.TIMED_OUT, f"not run: the kernel ran into its time limit {self._timeouts} times before"
            )
        return Verdict(
            VerdictKind.CRASHED, f"not run: the kernel's process died {op.deaths} times on {op.operator.name}"
        )

    def _request(self, op: _JudgedOperator, batch: Batch, *, together: bool) -> CallRequest:
        cases = [p.request() for p in batch.entries]
        counted = next((i for i, p in enumerate(batch.entries) if p.variant == "again"), None)
        if op.kernel["forbidden"] and counted is not None:
            cases[counted] = replace(cases[counted], count_calls=True)
        if "native" in op.kernel:  # users meet both forms: a call runs through Python until there is a plan for it
            again = [p.variant == "again" for p in batch.entries]
            cases = [replace(c, in_python=True) if second else c for c, second in zip(cases, again, strict=True)]
        return CallRequest(op.operator.name, cases, op.operator.is_random, together=together)

    def _breach(self, worker: KernelWorker, tampered: tuple[str, ...]) -> Verdict | None:
        """Return the verdict if the kernel did something that invalidates all its answers."""
        if tampered:
            return _tampering(tampered)
        if self._worker is None:  # lost while timing or drawing
            return None
        if self._loaded.get("mutant") is None and (strays := worker.kill_orphans()):
            return Verdict(VerdictKind.CHEATED, f"left {strays} detached process(es) running")
        return _dispatcher_bypass(worker, self._loaded) or self._check_registrations(worker)

    def _check_registrations(self, worker: KernelWorker) -> Verdict | None:
        """Check once everything that is registered under ``aten``.

        This is slow, so it is done only for kernels that would pass.
        """
        if self._registrations_checked:
            return None
        self._registrations_checked = True
        try:
            answer = worker.ask({"do": "registrations"}, timeout_s=self._config.preparation_timeout_s)
            reply = IntegrityReply.from_wire(answer)
        except WorkerDiedError as death:
            self._worker = None
            return Verdict(death.kind, f"while its registrations were checked: {death}")
        except MalformedReplyError as error:
            return Verdict(VerdictKind.CONTRACT, str(error))
        return _tampering(reply.tampered) if reply.tampered else None

    def _handle_death(self, op: _JudgedOperator, batch: Batch, death: WorkerDiedError, waiting: deque[CaseRow]) -> None:
        """Give the case that was running its verdict, and put the others of its batch back."""
        self._worker = None
        op.deaths += 1
        self._timeouts += death.timeouts
        entry = batch.entries[min(death.case_index, len(batch.entries) - 1)]
        if entry.variant in LARGE_VARIANT_NAMES and death.kind is VerdictKind.TIMED_OUT and self._allow_large_variants:
            self._allow_large_variants, op.deaths = False, op.deaths - 1
            self._timeouts = min(self._timeouts, MAX_TIMEOUTS - 1)  # it may still answer the cases themselves
            waiting.extendleft(reversed([p.case for p in batch.entries if not p.variant]))  # without large ones
            return
        failed_case = entry.case
        unfinished = [p.case for p in batch.entries if not p.variant and p.case is not failed_case]
        waiting.extendleft(reversed(unfinished))
        variant = f"{variants.describe(entry.variant)}: " if entry.variant else ""
        self._send_verdicts(op, [(failed_case, Verdict(death.kind, f"{variant}{death}"))])

    def _check_replies(
        self, op: _JudgedOperator, worker: KernelWorker, batch: Batch, replies: list[CallReply]
    ) -> list[tuple[CaseRow, Verdict]]:
        touched = batch.changed_inputs(worker.arena_view)
        results = worker.copy_results(replies)
        groups: dict[int, list[tuple[BatchEntry, Verdict]]] = {}
        first: CaseCheck | None = None
        effects: dict[str, str] = {}
        ways: dict[int, dict[str, str]] = {}
        for entry, reply, inputs in zip(batch.entries, replies, touched, strict=True):
            check = CaseCheck(
                op.operator, op.required, entry.expect, entry.call, entry.answer, reply, results,
                self._config.input_bytes, inputs, measure_errors=not entry.variant and "mutant" not in op.kernel,
            )  # fmt: skip
            verdict = check.verdict()
            if not entry.variant:
                first, ways[id(entry.case)] = check, _way_figures(reply)
                verdict = self._extra_checks(op, worker, batch, entry, check, verdict)
            elif verdict.kind is VerdictKind.WRONG and first is not None and batch.is_aten_at_fault(first.aten, entry):
                continue
            elif entry.variant in variants.REPLAY_VARIANTS and verdict.kind is VerdictKind.WRONG and first is not None:
                verdict = _replayed_result(first, check) or verdict
            elif entry.variant == "again" and verdict.passed and reply.calls is not None:
                verdict = replace(verdict, figures={"calls": reply.calls})
            if "mutant" in op.kernel:
                effects[entry.case.id] = reply.mutant
            groups.setdefault(id(entry.case), []).append((entry, verdict))
            if op.until_rejected and verdict.kind in REJECTING_KINDS:
                break
        settled = [(group[0][0].case, variants.combine_verdicts(group)) for group in groups.values()]
        if "mutant" in op.kernel:
            return [(c, replace(f, figures={**f.figures, "mutant": effects[c.id]})) for c, f in settled]
        settled = [(case, replace(v, figures={**ways[id(case)], **v.figures})) for case, v in settled]
        return [(case, self._with_notes(batch, case, verdict)) for case, verdict in settled]

    def _with_notes(self, batch: Batch, case: CaseRow, verdict: Verdict) -> Verdict:
        """Add notes on what was not judged because ATen is wrong, slow or dies there."""
        notes = [
            f"not judged {variants.describe(name)}: {batch.authority}'s own answer is another one there, "
            f"{batch.fault_note}"
            for name in batch.aten_bugs.get(case.id, ())
        ]
        if case.id in batch.slow_aten_s:
            notes.append(
                f"judged in fewer variants: {batch.authority} takes {batch.slow_aten_s[case.id]:.1f} s for a call"
            )
        if case.id in self._unvaried_case_ids:
            notes.append(
                f"judged as it stands only: ATen's own process dies on a hostile variant of this case, {PYTORCH_DEFECT}"
            )
        return replace(verdict, notes=(*verdict.notes, *notes)) if notes else verdict

    def _extra_checks(
        self,
        op: _JudgedOperator,
        worker: KernelWorker,
        batch: Batch,
        entry: BatchEntry,
        check: CaseCheck,
        verdict: Verdict,
    ) -> Verdict:
        """Check what needs more than one call: late results, gradients, random draws, times."""
        foreign = "mutant" not in op.kernel
        timed = foreign and entry.case.phase is Phase.PERFORMANCE
        if (
            foreign
            and verdict.kind is VerdictKind.WRONG
            and not op.checked_for_late_results
            and self._worker is not None
        ):
            op.checked_for_late_results = True
            return self._or_death(extra_checks.check_late_result, worker, entry, check) or verdict
        if foreign and verdict.passed and self._worker is not None and _differentiable(op, entry):
            verdict = self._or_death(self._judge_gradients, op, worker, entry) or verdict
        drew = check.aten.used_rng
        if not verdict.passed or not (drew or timed):
            return verdict
        if self._worker is None:
            return Verdict(VerdictKind.CRASHED, "extra checks skipped: the kernel's process died on an earlier case")
        if drew:
            verdict = self._or_death(judge_draws, worker, op.operator, entry, check, verdict) or verdict
        if verdict.passed and timed:
            race = functools.partial(
                self._case_timer.time_case,
                required=op.required,
                reference=op.reference,
                recheck=functools.partial(self._recheck_in_new_process, op, entry),
            )
            with self._exclusive(worker):
                verdict = self._or_death(race, op.operator, worker, batch, entry, verdict) or verdict
        return verdict

    def _recheck_in_new_process(self, op: _JudgedOperator, entry: BatchEntry, contents_seed: int) -> Verdict | None:
        """Judge the kernel on the contents of a timed call, in a new process and untimed."""
        kernel = op.kernel
        confinement = (
            self._worker_folders.reference_confinement(kernel["file"], kernel.get("library"))
            if self._worker_folders is not None
            else None
        )
        worker = KernelWorker(self._spawner, self._config, confinement)
        return extra_checks.recheck_in_new_process(
            worker, self._config, kernel, op.operator, entry, contents_seed, required=op.required
        )

    @contextlib.contextmanager
    def _exclusive(self, worker: KernelWorker) -> Iterator[None]:
        """Wait for exclusive use of the device, then for the other judges."""
        self._announce_and_wait("ready", worker)
        yield
        self._announce_and_wait("raced", worker)

    def _announce_and_wait(self, state: str, worker: KernelWorker) -> None:
        worker.pause()
        self._channel.send({state: True})
        self._channel.receive()
        worker.resume()

    def _judge_gradients(self, op: _JudgedOperator, worker: KernelWorker, entry: BatchEntry) -> Verdict | None:
        """Judge gradients through the operator while the kernel is installed in ATen's place."""
        call = entry.call.gradient_call()
        aten = call.run()
        if aten.raised is not None:  # no derivative, or not of these inputs
            return None
        op.gradient_cases += 1
        return extra_checks.check_gradients(worker, self._config, op.operator, entry, call, aten)

    def _or_death(self, check: Callable[..., Verdict | None], *args: Any) -> Verdict | None:
        """Run another check on a worker; if the worker dies, that is the verdict."""
        try:
            return check(*args)
        except WorkerDiedError as death:
            self._end_worker()
            self._timeouts += death.timeouts
            return Verdict(death.kind, str(death))

    def _ready_worker(self, kernel: dict[str, Any]) -> KernelWorker | None:
        """Return a worker with the kernel loaded; None, with the reason kept, if loading fails."""
        if self._load_failure is not None or (self._worker is not None and self._loaded == kernel):
            return self._worker
        if self._worker is not None and not (_is_own_code(kernel) and _is_own_code(self._loaded)):
            self._end_job_process()
        confinement = (
            self._worker_folders.kernel_confinement(kernel["file"], kernel.get("library"))
            if self._worker_folders is not None and self._worker is None
            else None
        )
        worker = self._worker or KernelWorker(self._spawner, self._config, confinement)
        self._worker = None
        try:
            worker.begin(LoadRequest(kernel))
            start_device(self._device)  # meanwhile
            answer = worker.answer(timeout_s=self._config.preparation_timeout_s)
            reply = LoadReply.from_wire(answer)
        except WorkerDiedError as death:
            self._load_failure = Verdict(death.kind, f"while loading: {death}")
            return None
        except MalformedReplyError as error:
            worker.close()
            self._load_failure = Verdict(VerdictKind.CONTRACT, f"while loading: {error}")
            return None
        if (refusal := _load_rejection(reply) or _dispatcher_bypass(worker, kernel)) is not None:
            worker.close()
            self._load_failure = refusal
            return None
        self._worker, self._loaded, self._registrations_checked = worker, kernel, False
        return worker

    def _end_job_process(self) -> None:
        """End the process of a job's kernel, and remove its folder."""
        self._end_worker()
        if self._worker_folders is not None:
            self._worker_folders.remove_job_folder()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _send_verdicts(self, op: _JudgedOperator, verdicts: list[tuple[CaseRow, Verdict]]) -> None:
        op.rejected |= any(verdict.kind in REJECTING_KINDS for _, verdict in verdicts)
        if verdicts:
            rows = [{"id": case.id, "phase": case.phase.value, **verdict.wire()} for case, verdict in verdicts]
            self._channel.send({"op": op.operator.name, "verdicts": rows})


def _is_own_code(kernel: dict[str, Any]) -> bool:
    """Whether a kernel is ATen, or a mutant of it: such kernels may share a process."""
    return "mutant" in kernel or (kernel["file"] is None and "reference" not in kernel)


def _differentiable(judged: _JudgedOperator, entry: BatchEntry) -> bool:
    """Whether the gradients of a case can be judged; ATen decides whether there are any."""
    op = judged.operator
    if judged.gradient_cases >= _MAX_GRADIENT_CASES:
        return False
    if judged.kernel["file"] is not None and not judged.kernel["forbidden"]:
        return False  # a kernel that falls back on the operator would call itself once installed
    if facts_of(op).property_check is not None:
        return False  # a different right answer has different gradients
    plain = op.kind is SchemaKind.FUNCTIONAL and not op.composite and not op.is_random and "_backward" not in op.base
    floats = any(row[2][0] in "fbc" and row[2] != "b8" and row[6] is None for row in entry.input_rows)
    large = sum(row[1] for row in entry.input_rows) > variants.MAX_VARIED_INPUT_BYTES
    return plain and floats and not large and entry.case.expect is Expect.RETURNS


def _replayed_result(first: CaseCheck, replayed: CaseCheck) -> Verdict | None:
    """Return the verdict on a kernel that answers for the earlier contents of its memory."""
    is_user_call = isinstance(first.call, UserCall)  # it returns all inputs, and they rightly hold the new contents
    call = replace(first.call, owns_storage=False) if is_user_call else first.call
    earlier = replace(replayed, call=call, aten=first.aten, notes=[], result_pairs=[], measure_errors=False)
    if not earlier.verdict().passed:
        return None
    return Verdict(VerdictKind.CHEATED, "returned the result of earlier contents of the same memory: a replayed result")


def _way_figures(reply: CallReply) -> dict[str, str]:
    """Return how a call ran behind a native slot; nothing if the kernel's function was called."""
    fields = {"ran": reply.ran, "not_replayed": reply.not_replayed[:_MAX_REASON_CHARS]}
    return {name: text for name, text in fields.items() if text} if reply.ran else {}


def _dispatcher_bypass(worker: KernelWorker, kernel: dict[str, Any]) -> Verdict | None:
    """Return the verdict on a kernel whose libraries call ATen's code past the dispatcher."""
    objection = worker.rejection_reason(kernel["forbidden"]) if kernel["forbidden"] else None
    return None if objection is None else Verdict(VerdictKind.CHEATED, objection)


def _tampering(changes: tuple[str, ...], when: str = "") -> Verdict:
    """Return the verdict on a kernel that has changed the process it runs in."""
    return Verdict(VerdictKind.CHEATED, f"{when}tampered with its process: {'; '.join(changes)}")


def _load_rejection(reply: LoadReply) -> Verdict | None:
    """Return why a kernel is rejected when it is loaded, or cannot be loaded."""
    if reply.escape_attempts is not None:
        return Verdict(VerdictKind.CHEATED, f"while loading: {reply.escape_attempts}")
    if reply.error is not None:
        return Verdict(VerdictKind.ERROR, f"cannot be loaded: {reply.error}")
    if reply.tampered:
        return _tampering(reply.tampered, "while loading, ")
    if reply.state_changes:
        changes = "; ".join(reply.state_changes)
        return Verdict(VerdictKind.CONTRACT, f"while loading, changed global state: {changes}")
    return None
