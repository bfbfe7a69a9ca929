"""Time a case that a kernel answers correctly, against ATen; add speed of light and clocks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.tensors import Bytes, same_bytes
from opforge.cases.wire import decode
from opforge.judge.batch import Batch, BatchEntry
from opforge.judge.compare.contract import CaseCheck, has_many_values
from opforge.judge.facts import facts_of
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig
from opforge.judge.reference.aten import CallOutcome, ReferenceFaultError
from opforge.judge.reference.user import UserCall, UserReference, load_reference
from opforge.judge.roofline import bound
from opforge.judge.roofline.peaks import Peaks
from opforge.judge.timing import device_monitor, gpu_race
from opforge.judge.timing.cpu_race import CpuRace
from opforge.judge.timing.gpu_race import ResultJudge, drawn_seeds
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.judge.worker_folders import WorkerFolders
from opforge.ops import Operator
from opforge.runtime.trees import instances
from opforge.sandbox.guest.cpu_timed_calls import result_parts
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import CallReply, MalformedReplyError
from opforge.sandbox.host.request import LoadRequest

_LAUNCH_BOUND_FACTOR = 2.0
"""Cases where ATen is within this factor of the smallest launch or call are launch-bound."""
_MAX_CONSTANT_CHECK_ATEN_S = 0.05
_CONSTANT_RESULT_NOTE = (
    "its result is the same for all contents of timed calls: a kernel could return it without reading them"
)
_CHANGES_GEOMETRY_NOTE = "not timed: it changes only its argument's geometry, and each call would change it further"


@dataclass
class CaseTimer:
    """Worker of ATen, or of a user's reference, kept between races; and the peaks of the device."""

    spawner: Spawner
    config: WorkerConfig
    worker_folders: WorkerFolders | None
    peaks: Peaks | None
    _baseline: KernelWorker | None = None
    _baseline_reference: dict[str, Any] | None = None
    """The user's reference that the baseline runs; None for ATen."""

    def time_case(
        self,
        op: Operator,
        worker: KernelWorker,
        batch: Batch,
        entry: BatchEntry,
        verdict: Verdict,
        *,
        required: bool,
        reference: UserReference | None = None,
        recheck: Callable[[int], Verdict | None] | None = None,
    ) -> Verdict:
        """Return the finding with times, or the verdict that timing led to.

        ``recheck`` judges the kernel in a new process, untimed, on contents with a seed. A kernel
        that is wrong there too does not cheat.
        """
        if "inplace_view" in op.tags:
            return replace(verdict, notes=(*verdict.notes, _CHANGES_GEOMETRY_NOTE))
        device = self._timing_device(entry)
        monitor = device_monitor.DeviceMonitor(self.config.device)

        try:
            baseline = self._ready_baseline(op, batch, reference)
        except ReferenceFaultError as error:
            return replace(verdict, notes=(*verdict.notes, f"not timed: the reference {error}"))
        race = self._new_race(op, worker, baseline, entry, device, monitor.sample, required=required)
        try:
            times = race.run()
        except gpu_race.BaselineError as error:
            self._end_baseline()
            return replace(verdict, notes=(*verdict.notes, f"not timed: {op.reference_name}'s own process: {error}"))
        except gpu_race.WrongOutputError as error:
            untimed = recheck(error.seed) if recheck is not None else None
            return untimed if untimed is not None and untimed.kind is VerdictKind.WRONG else error.verdict
        except RejectedError as error:
            return error.verdict
        except MalformedReplyError as error:
            return Verdict(VerdictKind.CONTRACT, str(error))
        sol_figures = self._roofline_figures(op, entry, race, times) if device.type == self._device.type else {}
        figures = {**verdict.figures, **times, **sol_figures}
        figures |= {"clocks": clock_figures} if (clock_figures := monitor.figures()) else {}
        notes = (*race.notes, *monitor.notes(), *((_CONSTANT_RESULT_NOTE,) if _has_constant_result(entry) else ()))
        return replace(verdict, notes=(*verdict.notes, *notes), figures=figures)

    def _new_race(
        self,
        op: Operator,
        worker: KernelWorker,
        baseline: KernelWorker,
        entry: BatchEntry,
        device: torch.device,
        sample_device: Callable[[], None],
        *,
        required: bool,
    ) -> gpu_race.GpuRace | CpuRace:
        """Return the race over a case."""
        writes = op.mutates or facts_of(op).undeclared_writes or _reference_writes_inputs(entry)
        judge_result = functools.partial(_judge_timed_result, op, entry, self.config, set(), required=required)
        judging = ResultJudge(
            functools.partial(_aten_answer, entry), judge_result, functools.partial(_require_in_domain, entry)
        )
        race_s = self.config.race_s
        if device.type == "cpu":
            return CpuRace(
                worker, baseline, op.name, entry, judging,
                writes_inputs=writes, race_s=race_s, sample_device=sample_device,
            )  # fmt: skip
        return gpu_race.GpuRace(
            worker, baseline, op.name, entry, judging, device,
            writes_inputs=writes, race_s=race_s, sample_device=sample_device,
        )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return torch.device(self.config.device)

    def _timing_device(self, entry: BatchEntry) -> torch.device:
        """Return the device to time a case on: the CPU if its tensors all lie on the host."""
        tensors = [*entry.answer.inputs, *instances(entry.answer.result, torch.Tensor)]
        return self._device if not tensors or any(t.is_cuda for t in tensors) else torch.device("cpu")

    def _ready_baseline(self, op: Operator, batch: Batch, reference: UserReference | None) -> KernelWorker:
        """Return a worker that runs ATen or a user's reference; reuse the last one if it fits."""
        described = None if reference is None else reference.description
        if self._baseline is not None and self._baseline_reference != described:
            self._end_baseline()
        if self._baseline is None and reference is not None:
            worker = KernelWorker(self.spawner, self.config, reference.confinement())
            self._baseline = load_reference(worker, reference.description)
        elif self._baseline is None:
            confinement = self.worker_folders.baseline_confinement() if self.worker_folders is not None else None
            self._baseline = KernelWorker(self.spawner, self.config, confinement)
            load = LoadRequest({"file": None, "primary": op.name, "entries": []})
            self._baseline.ask(load, timeout_s=self.config.preparation_timeout_s)
        self._baseline_reference = described
        batch.copy_to(self._baseline.arena_view)
        return self._baseline

    def _end_baseline(self) -> None:
        if self._baseline is not None:
            self._baseline.close()
            self._baseline = None

    def _roofline_figures(
        self, op: Operator, entry: BatchEntry, race: gpu_race.GpuRace | CpuRace, times: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the case's cost at the speed of light, and whether it is launch-bound."""
        if self.peaks is None:
            return {}
        inputs = iter(entry.answer.inputs)
        args, *kwargs = decode([entry.call.args, *entry.call.kwargs.values()], lambda _row: next(inputs))
        shared = entry.answer.shared_inputs or {}
        result = (
            entry.answer.result
            if not shared
            else [t for t in instances(entry.answer.result, torch.Tensor) if not shared[id(t)]]
        )
        cost = bound.cost(op, args, dict(zip(entry.call.kwargs, kwargs, strict=True)), result)
        kernel_us, aten_us = times["kernel_us"], times["aten_us"]
        slow_us = kernel_us * times["speedup"] / times["speedup_low"]
        smallest_us = self.peaks.call_us if times["timed"] == "call" else self.peaks.launch_us
        shares = bound.sol_figures(
            cost,
            self.peaks,
            min(race.footprint_bytes, cost.footprint(race.input_sets)),
            kernel_us,
            aten_us,
            kernel_us_high=slow_us,
            floor_us=smallest_us,
            kept_bytes=race.kept_bytes,
        )
        return (
            {**shares, "launch_bound": True}
            if smallest_us is not None and aten_us <= _LAUNCH_BOUND_FACTOR * smallest_us
            else shares
        )


def _has_constant_result(entry: BatchEntry) -> bool:
    """Whether ATen gives one answer to different contents, in a few tries."""
    if isinstance(entry.call, UserCall) or entry.answer.used_rng or entry.aten_s > _MAX_CONSTANT_CHECK_ATEN_S:
        return False
    answers = [replace(entry.call, contents_seed=seed).run() for seed in drawn_seeds(3)]
    return all(a.raised is None for a in answers) and all(map(_identical, answers, answers[1:]))


def _identical(left: CallOutcome, right: CallOutcome) -> bool:
    pairs = list(zip(result_parts(left.result), result_parts(right.result), strict=False))
    return bool(pairs) and all(
        a.shape == b.shape and same_bytes(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a == b
        for a, b in pairs
    )


def _aten_answer(entry: BatchEntry, seed: int) -> CallOutcome:
    """Return ATen's answer to a case on contents with a seed; raises BaselineError if it raises."""
    aten = replace(entry.call, contents_seed=seed).run()
    if aten.raised is not None:
        raise gpu_race.BaselineError(f"it raised {type(aten.raised).__name__}: {aten.raised}")
    return aten


def _judge_timed_result(
    op: Operator,
    entry: BatchEntry,
    config: WorkerConfig,
    drawn: set[bytes],
    reply: CallReply,
    results: Bytes,
    seed: int,
    aten: CallOutcome,
    *,
    required: bool,
) -> Verdict:
    """Judge the result of a timed call on contents with a seed, and any inputs in the reply.

    ``drawn`` has digests of earlier random results: none may come twice.
    """
    call = replace(entry.call, contents_seed=seed)
    verdict = CaseCheck(
        op,
        required,
        entry.case.expect,
        call,
        aten,
        reply,
        results,
        config.input_bytes,
        measure_errors=False,
        reply_has_inputs=reply.inputs is not None,
    ).verdict()
    if not verdict.passed:
        _require_in_domain(entry, seed)
        return verdict
    if aten.used_rng and any(map(has_many_values, instances(aten.result, torch.Tensor))):
        digest = hashlib.blake2b(results.data).digest()
        if digest in drawn:
            return Verdict(VerdictKind.WRONG, "returns the same random numbers as an earlier call")
        drawn.add(digest)
    return verdict


def _require_in_domain(entry: BatchEntry, seed: int) -> None:
    """Raise BaselineError if ATen raises one rounding step away from contents with a seed."""
    raised = replace(entry.call, contents_seed=seed).nearby_error()
    if raised is not None:
        text = f"it raised {type(raised).__name__}: {raised} (contents moved by a rounding step)"
        raise gpu_race.BaselineError(text)


def _reference_writes_inputs(entry: BatchEntry) -> bool:
    """Whether a user's reference changes an input of this case."""
    return isinstance(entry.call, UserCall) and entry.call.writes_inputs(entry.answer)
