"""Race a kernel against ATen on a CPU, using only the judge's own observations.

While a worker is stopped, the judge writes new contents into the inputs of a block of calls. Then
its clock runs until the worker is stopped again. After each block, results chosen at random are
judged. They are read from the worker's memory before any of it runs again. Some blocks, chosen at
random, are stopped half-way, to check that calls that have returned have done their work.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from opforge.cases.tensors import Bytes, Renewal, flat_bytes, tensor_from_row, words_of
from opforge.cases.wire import SHORT_DTYPES
from opforge.judge.batch import BatchEntry
from opforge.judge.kernel_worker import KernelWorker
from opforge.judge.reference.aten import CallOutcome
from opforge.judge.timing.gpu_race import (
    KernelRaisedError,
    PartBytes,
    ResultJudge,
    Side,
    WrongOutputError,
    check_isolation,
    drawn_seeds,
    judge_reported_result,
)
from opforge.judge.timing.measurement import Measurement, Wait
from opforge.judge.timing.result_check import spanned_elements
from opforge.judge.verdict import RejectedError, VerdictKind
from opforge.procs import linux
from opforge.sandbox.guest.aliases import InputAliases
from opforge.sandbox.guest.cpu_timed_calls import WORDS_PER_PART, result_parts
from opforge.sandbox.host.reply import CallReply, HostAllocateReply, MalformedReplyError, ReportedTensor
from opforge.sandbox.host.request import HostAllocateRequest, HostRunRequest, TimedCase

_BUSY_FACTOR = 5
"""A race takes this many times as long if most times contain waits for a core that cannot be subtracted."""
BUSY_NOTE = (
    "other programs kept the cores busy: the kernel's times include waits for a core, so it may be faster than shown"
)
_BLOCK_NS = 8_000_000
_FIRST_CALLS = 8
_MAX_GUESS_BLOCKS = 8
_MAX_CALLS = 512
_MAX_BLOCK_TENSORS = 1024
_MAX_BLOCK_BYTES = 64 << 20
_RELAYOUT_EVERY = 3
"""Rounds before all calls are allocated again: memory placement changes times by some percent."""
_JUDGED_CALLS_PER_BLOCK = 2
"""Calls of a block that are judged."""
_MAX_CHEAP_BYTES = 16 << 20
_MAX_CHEAP_TENSORS = 64
"""Of calls above either limit, one is judged in one of three blocks.

Judging it takes longer than timing it."""
_COSTLY_JUDGE_PROBABILITY = 1 / 3
_HALT_PROBABILITY = 1 / 6
"""Probability that an extra block of the kernel is stopped half-way before a timed one."""
_MAX_HALF_WAY_TRIES = 24
"""Attempts to stop a block half-way at the end of a race in which none has succeeded."""
_EXTRA_WAIT_NS = 100_000_000
"""Extra wait of the later attempts, for a worker that other processes keep from running."""
_MIN_RETURNED_SHARE = 0.25
"""Share of the expected calls below which calls are taken to return all at once."""
_TAMPER_CHECK_SHARE = 0.2
"""Share of blocks after which the worker is checked for tampering, besides the last."""
_DRY_BLOCKS = 7
_MAX_WAIT_SHARE = 0.03
"""Share of a block that a side may wait for a core; above it, the round is set aside."""
_ROUNDS_PER_CLOCK_SAMPLE = 4
"""The machine's clocks are sampled once in this many rounds."""


class CpuRace:
    """A race over one case. ``writes_inputs`` says whether its operator may write to inputs."""

    def __init__(
        self,
        kernel: KernelWorker,
        baseline: KernelWorker,
        op: str,
        entry: BatchEntry,
        judging: ResultJudge | None,
        *,
        writes_inputs: bool,
        race_s: float,
        sample_device: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._aten = Side(kernel, is_kernel=True), Side(baseline, is_kernel=False)
        self._sides = (self._aten, self._kernel)
        self._timed = TimedCase(op, entry.request(), "cpu")
        self._judging = judging
        self._writes_inputs = writes_inputs
        self._race_s = race_s
        self._sample_device = sample_device
        self._random = random.SystemRandom()
        inputs = [tensor_from_row(entry.call.buffer, row) for row in entry.input_rows]
        self._renewals = [Renewal(words_of(t), t.dtype, positions=entry.call.may_hold_indices) for t in inputs]
        self._parts = max(1, len(result_parts(entry.answer.result)))
        results = [part for part in result_parts(entry.answer.result) if isinstance(part, torch.Tensor)]
        self._call_bytes = max(1, sum(row[1] for row in entry.input_rows) + sum(t.nbytes for t in results))
        self._call_tensors = max(1, len(self._renewals))
        self._is_costly = self._call_bytes > _MAX_CHEAP_BYTES or self._call_tensors > _MAX_CHEAP_TENSORS
        self._cores: set[int] = set()
        """Core that both sides and this process share, one at a time."""
        self._all_cores: set[int] = set()
        self._addresses: dict[bool, list[list[int]]] = {}
        """Addresses of the inputs of each call, by side."""
        self._contents: list[list[Bytes]] = []
        """Contents written into the inputs of each call."""
        self._seeds: list[int] = []
        self._overhead_ns = 0.0
        self._judged = self._half_way_stops = self._early_returns = 0
        self._half_way_confirmed = False
        self._block_cpu_ns: list[int] = []
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        """Return the figures of both sides, with their ratio and its 95 % interval."""
        self._all_cores = cores = os.sched_getaffinity(0)
        self._cores = {self._random.choice(sorted(cores))}
        try:
            # the process that writes inputs leaves them, and the core, warm
            os.sched_setaffinity(0, self._cores)
            for side in self._sides:
                side.worker.find_descendants()
                side.worker.pin_to_cores(self._cores)
            measurement = self._size_blocks()
            began = time.monotonic()
            order = list(self._sides)
            while not measurement.done:
                if measurement.rounds and measurement.rounds % _RELAYOUT_EVERY == 0:
                    self._allocate(measurement.calls)
                needs_more = measurement.needs_more_rounds
                out_of_time = time.monotonic() > began + self._race_s * (_BUSY_FACTOR if needs_more else 1)
                measurement.done = measurement.next_round_is_last(out_of_time=out_of_time) and (
                    out_of_time or not needs_more
                )
                if measurement.rounds % 2 == 0:
                    self._random.shuffle(order)
                else:
                    order.reverse()
                self._time_round(order, measurement)
            if self._early_returns > 1 and self._early_returns == self._half_way_stops:
                raise RejectedError(VerdictKind.CHEATED, "its calls return before their work is done, or all at once")
        finally:
            os.sched_setaffinity(0, cores)
            for side in self._sides:
                side.worker.resume()
                side.worker.pin_to_cores(cores)
        for side in self._sides:
            side.ask({"do": "clear"})
        if measurement.needs_more_rounds:
            self.notes.append(BUSY_NOTE)
        return self._row(measurement)

    @property
    def footprint_bytes(self) -> int:
        """Return the bytes that the calls of a block touch."""
        return int(self._call_bytes * len(self._seeds))

    @property
    def input_sets(self) -> int:
        """Return how many calls of a block have inputs of their own."""
        return len(self._seeds)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of a call's results that caches surely hold back from memory: unknown."""
        return 0

    def _row(self, measurement: Measurement) -> dict[str, Any]:
        row = measurement.row()
        headline = {"timed": measurement.name, "kernel_us": row["kernel_us"], "aten_us": row["aten_us"]}
        interval = {"speedup": row["speedup"], "speedup_low": row["low"], "speedup_high": row["high"]}
        return {**headline, **interval, "rounds": row["rounds"], measurement.name: row}

    def _size_blocks(self) -> Measurement:
        """Allocate enough calls on both sides for a precise time by the judge's clock."""
        max_calls = max(
            1, min(_MAX_CALLS, _MAX_BLOCK_BYTES // self._call_bytes, _MAX_BLOCK_TENSORS // self._call_tensors)
        )
        first = min(_FIRST_CALLS, max_calls)
        self._allocate(first)
        call_ns = [self._estimate_block_ns(side) / first for side in self._sides]
        calls = int(max(1, min(max_calls, _BLOCK_NS / max(1.0, *call_ns))))
        self._allocate(calls)
        return Measurement("call", calls, relayout_every=_RELAYOUT_EVERY)

    def _estimate_block_ns(self, side: Side) -> float:
        """Return the shortest time of two blocks, or of more while all contain waits for a core."""
        self._renew()
        blocks = [self._time_block(side), self._time_block(side)]
        while len(blocks) < _MAX_GUESS_BLOCKS and all(wait is Wait.INCLUDED for _, wait in blocks):
            blocks.append(self._time_block(side))
        return min(took for took, _ in blocks)

    def _allocate(self, calls: int) -> None:
        """Allocate the calls on both sides in new memory, and measure the overhead of a block."""
        for side in self._sides:
            self._run_alone(side)
            request = HostAllocateRequest(calls, self._parts, None if side.has_calls else self._timed)
            reply = HostAllocateReply.from_wire(side.ask(request, calls), calls, len(self._renewals))
            side.has_calls = True
            self._addresses[side.is_kernel] = reply.addresses
            if not side.worker.memory_is_readable:
                raise RejectedError(VerdictKind.ERROR, "opforge cannot read the memory of a kernel's process here")
        self._seeds = [0] * calls
        self._renew()
        for side in (self._kernel, self._aten):  # the first block touches new memory
            self._time_block(side)
        self._overhead_ns = statistics.median(self._run_block(self._aten, dry=True)[0] for _ in range(_DRY_BLOCKS))

    def _renew(self) -> bool:
        """Draw new contents for the calls of a block."""
        self._seeds = drawn_seeds(len(self._seeds))
        rows = [renewal.contents(self._seeds) for renewal in self._renewals]
        self._contents = [[row[call].view(torch.uint8).numpy() for row in rows] for call in range(len(self._seeds))]
        return True

    def _time_round(self, order: list[Side], measurement: Measurement) -> None:
        measurement.waits.append(Wait.NONE)
        self._renew()
        for side in order:
            if side.is_kernel and self._has_many_calls(measurement):
                self._maybe_stop_half_way(measurement)
            took, waited = self._time_block(side, measurement.rounds)
            measurement.waits[-1] = max(measurement.waits[-1], waited)
            (measurement.kernel_ns if side.is_kernel else measurement.aten_ns).append(took / measurement.calls)
            if side.is_kernel:
                self._judge_results(last=measurement.done)

    def _run_alone(self, side: Side) -> None:
        """Let one side run, with the other one stopped."""
        (self._aten if side is self._kernel else self._kernel).pause_and_wait()
        side.worker.resume()

    def _time_block(self, side: Side, number: int = 1) -> tuple[float, Wait]:
        """Time a block of one side, and leave the worker stopped.

        Return the time of its calls, and whether a process waited for a core.
        """
        self._prepare(side)
        try:
            took, waited = self._run_block(side, dry=False, watched=number % _ROUNDS_PER_CLOCK_SAMPLE == 0)
        except KernelRaisedError:
            self._require_aten_returns()
            raise
        return max(1.0, took - self._overhead_ns), waited

    def _prepare(self, side: Side) -> None:
        """Stop both sides, and write the contents of the next block into one side's inputs."""
        for each_side in self._sides:
            each_side.pause_and_wait()
        try:
            for addresses, contents in zip(self._addresses[side.is_kernel], self._contents, strict=True):
                for address, bytes_ in zip(addresses, contents, strict=True):
                    if len(bytes_):
                        side.worker.write_memory(address, bytes_)
        except OSError:
            raise MalformedReplyError from None
        side.worker.results[: 8 * WORDS_PER_PART * self._parts * len(self._seeds)] = 0

    def _run_block(self, side: Side, *, dry: bool, watched: bool = False) -> tuple[float, Wait]:
        """Let a stopped worker run a block; return its time on the judge's clock, and any wait.

        The time ends when all of the worker is stopped again. Waits of the worker or this process
        for a core that others use are subtracted. For the kernel, nothing is subtracted if a process
        or thread was started meanwhile, or its worker has other processes: it might have waited for
        one of its own.
        """
        worker, judge_pid = side.worker, os.getpid()
        worker.begin(HostRunRequest(dry))
        cpu, waited, judge_wait = worker.cpu_ns(), worker.waited_ns(), linux.run_queue_wait_ns(judge_pid)
        last_pid = linux.last_pid()
        began = time.perf_counter_ns()
        worker.resume()
        if watched and self._sample_device is not None:
            self._sample_device()  # while the block runs
        side.answer(len(self._seeds))
        side.pause_and_wait()
        took = time.perf_counter_ns() - began
        waited = max(0, worker.waited_ns() - waited) + max(0, linux.run_queue_wait_ns(judge_pid) - judge_wait)
        cpu = worker.cpu_ns() - cpu
        wait = Wait.NONE if waited <= _MAX_WAIT_SHARE * took else Wait.INCLUDED
        if not side.is_kernel or (linux.last_pid() == last_pid and not worker.descendants):
            took = max(took - waited, cpu)
            wait = min(wait, Wait.EXCLUDED)
        if side.is_kernel:
            self._block_cpu_ns.append(cpu)
            check_isolation(worker, self._cores)
        return took, wait

    def _require_aten_returns(self) -> None:
        """Run ATen on the contents on which the kernel raised.

        If ATen raises too, there or close by, the kernel is not at fault.
        """
        self._time_block(self._aten)
        raised_at = self._returned_calls()[-1:]  # the calls are made one after the other
        if self._judging is not None:
            for seed in self._seeds[raised_at[0] + 1 :][:1] if raised_at else self._seeds[:1]:
                self._judging.require_in_domain(seed)

    def _returned_calls(self) -> list[int]:
        """Return which calls of the kernel's last block have returned."""
        table = self._kernel.worker.results[: 8 * WORDS_PER_PART * self._parts * len(self._seeds)].view(np.uint64)
        calls: list[int] = np.flatnonzero(table.reshape(len(self._seeds), -1)[:, 0]).tolist()
        return calls

    def _judge_results(self, *, last: bool) -> None:
        """Judge results of the block just timed, and resume the stopped worker.

        The calls are chosen at random now, so that no kernel knows them before.
        """
        if self._judging is None:
            self._kernel.worker.resume()
            return
        chosen: list[int] = []
        if not self._is_costly:
            chosen = self._random.sample(range(len(self._seeds)), min(_JUDGED_CALLS_PER_BLOCK, len(self._seeds)))
        elif self._random.random() < _COSTLY_JUDGE_PROBABILITY or (last and not self._judged):
            chosen = [self._random.randrange(len(self._seeds))]
        results = [(call, self._read_result(call)) for call in chosen]
        self._kernel.worker.resume()
        for number, (call, (answer, parts)) in enumerate(results):
            self._judged += 1
            check_integrity = number == len(results) - 1 and (last or self._random.random() < _TAMPER_CHECK_SHARE)
            judge_reported_result(
                self._kernel,
                self._judging,
                call,
                self._seeds[call],
                answer,
                parts,
                with_inputs=self._timed.case.owns_storage,
                check_integrity=check_integrity,
                thorough=last,
            )

    def _read_result(self, call: int) -> tuple[CallOutcome, PartBytes]:
        """Check a call's inputs in the stopped worker; return ATen's answer and the result read."""
        assert self._judging is not None  # noqa: S101  # called only when judging
        answer = self._judging.expected(self._seeds[call])
        worker = self._kernel.worker
        try:
            if not self._writes_inputs:
                for number, (address, contents) in enumerate(
                    zip(self._addresses[True][call], self._contents[call], strict=True)
                ):
                    if len(contents) and worker.read_memory(address, len(contents)) != contents.data:
                        raise RejectedError(VerdictKind.CONTRACT, f"a timed call changed its input {number}")
            table = worker.results[: 8 * WORDS_PER_PART * self._parts * len(self._seeds)].view(np.uint64)
            entries = table.reshape(len(self._seeds), self._parts, WORDS_PER_PART)[call].tolist()
            parts: PartBytes = []
            for part, (address, bits) in zip(result_parts(answer.result), entries, strict=False):
                if not isinstance(part, torch.Tensor):
                    parts.append(bits)
                elif part.is_conj() or part.is_neg() or part.layout is not torch.strided or part.is_cuda:
                    parts.append(None)
                else:
                    parts.append(
                        worker.read_memory(address, spanned_elements(part.shape, part.stride()) * part.element_size())
                    )
        except OSError:
            raise RejectedError(
                VerdictKind.CHEATED, "an output of a timed call is wrong: it lies where the process has no memory"
            ) from None
        return answer, parts

    def _has_many_calls(self, measurement: Measurement) -> bool:
        """Whether a block can be stopped between calls, and results judged by elements alone."""
        few = measurement.calls < _FIRST_CALLS // 2 or len(self._all_cores) == 1 or self._judging is None
        return not (few or self._is_costly)

    def _maybe_stop_half_way(self, measurement: Measurement) -> None:
        """Stop a block half-way, at random, and at least once if a busy machine allows it."""
        if self._random.random() < _HALT_PROBABILITY:
            self._stop_half_way(measurement)
        for number in range(_MAX_HALF_WAY_TRIES if measurement.done else 0):
            if not self._half_way_confirmed:
                self._stop_half_way(measurement, _EXTRA_WAIT_NS if number >= _MAX_HALF_WAY_TRIES // 3 else 0)

    def _stop_half_way(self, measurement: Measurement, extra_wait_ns: int = 0) -> None:
        """Stop the kernel in the middle of a block, and judge a result that was returned."""
        assert self._judging is not None  # noqa: S101
        side, worker = self._kernel, self._kernel.worker
        self._prepare(side)
        cpu, usual_cpu_ns = worker.cpu_ns(), statistics.median(self._block_cpu_ns)
        share = self._random.uniform(0.4, 0.9)
        # from another core, the worker can be stopped at any moment
        os.sched_setaffinity(0, self._all_cores - self._cores)
        worker.begin(HostRunRequest(dry=False))
        worker.resume()
        # by the clock: the CPU time of a process is not known while it runs
        deadline = time.perf_counter_ns() + share * usual_cpu_ns + extra_wait_ns
        while time.perf_counter_ns() < deadline and len(self._returned_calls()) < share * measurement.calls:
            pass
        worker.pause_and_wait()
        os.sched_setaffinity(0, self._cores)
        returned = self._returned_calls()
        ran_ns = worker.cpu_ns() - cpu
        half_way = len(returned) < measurement.calls  # a finished block hides when its work was done
        behind = half_way and len(returned) < _MIN_RETURNED_SHARE * min(1.0, ran_ns / usual_cpu_ns) * measurement.calls
        if half_way and ran_ns > 0.3 * usual_cpu_ns:
            self._half_way_stops += 1
            self._early_returns += behind
        self._half_way_confirmed |= half_way and len(returned) > 0 and not behind
        call = self._random.choice(returned) if returned else None
        result = None if call is None else self._read_result(call)
        worker.resume()
        side.answer(measurement.calls)
        if call is None or result is None:
            return
        answer, parts = result
        reply, bytes_ = _as_reply(answer, parts, worker.config.input_bytes)
        verdict = self._judging.judge(reply, bytes_, self._seeds[call], answer)
        if not verdict.passed:
            raise WrongOutputError(f"when its call had returned, {verdict.reason}", self._seeds[call])


def _as_reply(answer: CallOutcome, parts: PartBytes, base: int) -> tuple[CallReply, Bytes]:
    """Return results read from a stopped worker as a reply, with ATen's layout and aliasing."""
    remaining = iter(parts)
    bytes_ = bytearray()
    input_aliases, shared = InputAliases(answer.inputs), answer.shared_inputs

    def described(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [described(item) for item in value]
        if not isinstance(value, torch.Tensor):
            next(remaining, None) if isinstance(value, bool | int | float) else None
            return value
        part, start = next(remaining, None), len(bytes_)
        read = isinstance(part, bytearray) and part
        tensor = torch.frombuffer(read, dtype=value.dtype).as_strided(value.shape, value.stride()) if read else value
        bytes_.extend(flat_bytes(tensor).numpy())
        aliases = input_aliases.sharing_memory(value) if shared is None else shared.get(id(value), [])
        return ReportedTensor(
            base + start,
            len(bytes_) - start,
            SHORT_DTYPES[value.dtype],
            tuple(value.shape),
            value.stride(),
            "cpu",
            tuple(input_aliases.identical(value)),
            tuple(aliases),
        )

    return CallReply(returned=described(answer.result)), np.frombuffer(bytes_, np.uint8)
