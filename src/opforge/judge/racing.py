"""Time a case that a kernel answers correctly, against ATen; add speed of light and clocks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.encoding import decode
from opforge.cases.materialise import Bytes
from opforge.judge import clocks, light, timing
from opforge.judge.asked import AskedCall, Reference, load
from opforge.judge.batch import Batch, Placed
from opforge.judge.contract import Hearing, is_varied
from opforge.judge.host_race import HostRace
from opforge.judge.numerics import same_bytes
from opforge.judge.peaks import Peaks
from opforge.judge.properties import WRITES_UNSAID
from opforge.judge.reference import Answer, Exact, ReferenceFaultError, tensors_of
from opforge.judge.rooms import Rooms
from opforge.judge.timing import Judging, drawn_seeds
from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.judge.workers import KernelWorker, WorkerConfig
from opforge.ops import Operator
from opforge.sandbox.client import Spawner
from opforge.sandbox.host_track import parts_of

_LAUNCH_BOUND_FACTOR = 2.0
"""Cases where ATen is within this factor of the smallest launch or call are launch-bound."""
_MAX_FORESEEABLE_ATEN_S = 0.05
_FORESEEABLE_NOTE = (
    "its answer is the same for all contents that timed calls have: a kernel may know it without reading them"
)


@dataclass
class Racing:
    """Worker of ATen, or of a user's reference, kept between races; and the peaks of the device."""

    spawner: Spawner
    config: WorkerConfig
    rooms: Rooms | None
    peaks: Peaks | None
    _baseline: KernelWorker | None = None
    _runs: dict[str, Any] | None = None
    """The user's reference that the baseline runs; None for ATen."""

    def race(
        self,
        op: Operator,
        worker: KernelWorker,
        batch: Batch,
        placed: Placed,
        finding: Finding,
        *,
        required: bool,
        reference: Reference | None = None,
        apart: Callable[[int], Finding | None] | None = None,
    ) -> Finding:
        """Return the finding with times, or the verdict that timing led to.

        ``apart`` judges the kernel in a new process, untimed, on contents with a seed. A kernel
        that is wrong there too does not cheat.
        """
        device = self._place(placed)
        watch = clocks.Watch(self.config.device)

        try:
            baseline = self._ready_baseline(op, batch, reference)
        except ReferenceFaultError as error:
            return replace(finding, notes=(*finding.notes, f"not timed: the reference {error}"))
        race = self._race(op, worker, baseline, placed, device, watch.sample, required=required)
        try:
            times = race.run()
        except timing.BaselineError as error:
            self._end_baseline()
            return replace(finding, notes=(*finding.notes, f"not timed: {op.authority}'s own process: {error}"))
        except timing.WrongOutputError as error:
            untimed = apart(error.seed) if apart is not None else None
            return untimed if untimed is not None and untimed.outcome is Outcome.WRONG else error.finding
        except NotRightError as error:
            return error.finding
        light_figures = self._light(op, placed, race.footprint, times) if device.type == self._device.type else {}
        figures = {**finding.figures, **times, **light_figures}
        figures |= {"clocks": clock_figures} if (clock_figures := watch.figures()) else {}
        notes = (*race.notes, *watch.remarks(), *((_FORESEEABLE_NOTE,) if _is_foreseeable(placed) else ()))
        return replace(finding, notes=(*finding.notes, *notes), figures=figures)

    def _race(
        self,
        op: Operator,
        worker: KernelWorker,
        baseline: KernelWorker,
        placed: Placed,
        device: torch.device,
        watch: Callable[[], None],
        *,
        required: bool,
    ) -> timing.Race | HostRace:
        """Return the race over a case."""
        writes = op.mutates or op.base in WRITES_UNSAID or _writes(placed)
        judge_result = functools.partial(_judge_timed_result, op, placed, self.config, set(), required=required)
        judging = Judging(functools.partial(_aten_answer, placed), judge_result, functools.partial(_inside, placed))
        if device.type == "cpu":
            return HostRace(worker, baseline, op.name, placed, judging, writes=writes, watch=watch)
        return timing.Race(worker, baseline, op.name, placed, judging, device, writes=writes, watch=watch)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.config.device)

    def _place(self, placed: Placed) -> torch.device:
        """Return the device to time a case on: the CPU if its tensors all lie on the host."""
        tensors = [*placed.answer.inputs, *tensors_of(placed.answer.result)]
        return self._device if not tensors or any(t.is_cuda for t in tensors) else torch.device("cpu")

    def _ready_baseline(self, op: Operator, batch: Batch, reference: Reference | None) -> KernelWorker:
        """Return a worker that runs ATen or a user's reference; reuse the last one if it fits."""
        described = None if reference is None else reference.described
        if self._baseline is not None and self._runs != described:
            self._end_baseline()
        if self._baseline is None and reference is not None:
            worker = KernelWorker(self.spawner, self.config, reference.room())
            self._baseline = load(worker, reference.described, self.config.timeout_s)
        elif self._baseline is None:
            room = self.rooms.baseline() if self.rooms is not None else None
            self._baseline = KernelWorker(self.spawner, self.config, room)
            self._baseline.ask({"do": "load", "kernel": {"file": None, "primary": op.name, "entries": []}})
        self._runs = described
        batch.copy_to(self._baseline.bytes)
        return self._baseline

    def _end_baseline(self) -> None:
        if self._baseline is not None:
            self._baseline.close()
            self._baseline = None

    def _light(self, op: Operator, placed: Placed, footprint: int, times: dict[str, Any]) -> dict[str, Any]:
        """Return the case's cost at the speed of light, and whether it is launch-bound."""
        if self.peaks is None:
            return {}
        inputs = iter(placed.answer.inputs)
        args, *kwargs = decode([placed.call.args, *placed.call.kwargs.values()], lambda _row: next(inputs))
        shared = placed.answer.shared or {}
        result = (
            placed.answer.result if not shared else [t for t in tensors_of(placed.answer.result) if not shared[id(t)]]
        )
        cost = light.cost(op, args, dict(zip(placed.call.kwargs, kwargs, strict=True)), result)
        kernel_us, aten_us = times["kernel_us"], times["aten_us"]
        slow_us = kernel_us * times["speedup"] / times["speedup_low"]
        shares = light.shares(cost, self.peaks, footprint, kernel_us, aten_us, slow_us=slow_us)
        smallest_us = self.peaks.call_us if times["timed"] == "call" else self.peaks.launch_us
        return (
            {**shares, "launch_bound": True}
            if smallest_us is not None and aten_us <= _LAUNCH_BOUND_FACTOR * smallest_us
            else shares
        )


def _is_foreseeable(placed: Placed) -> bool:
    """Whether ATen gives one answer to different contents, in a few tries."""
    if isinstance(placed.call, AskedCall) or placed.answer.drew or placed.aten_s > _MAX_FORESEEABLE_ATEN_S:
        return False
    answers = [replace(placed.call, renewal=seed).run() for seed in drawn_seeds(3)]
    return all(a.raised is None for a in answers) and all(map(_identical, answers, answers[1:]))


def _identical(left: Answer, right: Answer) -> bool:
    pairs = list(zip(parts_of(left.result), parts_of(right.result), strict=False))
    return bool(pairs) and all(
        a.shape == b.shape and same_bytes(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else a == b
        for a, b in pairs
    )


def _aten_answer(placed: Placed, seed: int) -> Answer:
    """Return ATen's answer to a case on contents with a seed; raises BaselineError if it raises."""
    aten = replace(placed.call, renewal=seed).run()
    if aten.raised is not None:
        raise timing.BaselineError(f"it raised {type(aten.raised).__name__}: {aten.raised}")
    return aten


def _judge_timed_result(
    op: Operator,
    placed: Placed,
    config: WorkerConfig,
    drawn: set[bytes],
    reply: dict[str, Any],
    results: Bytes,
    seed: int,
    aten: Answer,
    *,
    required: bool,
) -> Finding:
    """Judge the result of a timed call on contents with a seed, and any inputs in the reply.

    ``drawn`` has digests of earlier random results: none may come twice.
    """
    call = replace(placed.call, renewal=seed)
    finding = Hearing(
        op,
        required,
        placed.case.expect,
        call,
        aten,
        reply,
        results,
        config.in_bytes,
        measure=False,
        inputs_too="inputs" in reply,
    ).finding()
    if not finding.passed:
        _inside(placed, seed)
        return finding
    if aten.drew and any(map(is_varied, tensors_of(aten.result))):
        digest = hashlib.blake2b(results.data).digest()
        if digest in drawn:
            return Finding(Outcome.WRONG, "draws the very numbers of an earlier call")
        drawn.add(digest)
    return finding


def _inside(placed: Placed, seed: int) -> None:
    """Raise BaselineError if ATen raises one rounding step away from contents with a seed."""
    raised = Exact(replace(placed.call, renewal=seed)).raised_nearby()
    if raised is not None:
        text = f"it raised {type(raised).__name__}: {raised} (contents moved by a rounding step)"
        raise timing.BaselineError(text)


def _writes(placed: Placed) -> bool:
    """Whether a user's reference changes an input of this case."""
    return isinstance(placed.call, AskedCall) and placed.call.writes(placed.answer)
