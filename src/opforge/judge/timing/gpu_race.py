"""Race a kernel against ATen on a GPU: one worker each, short blocks in random order.

A race gives the ratio, with its interval, of three times: device time (the work of the GPU), call
time (what a caller waits for, many calls in a row) and synchronous call time. While a worker is
stopped, the judge writes new contents into the inputs of a block of calls, through GPU memory that
it has mapped into its own context. When the block's answer comes, the judge stops the worker again
and copies the result of one unpredictable call. The judge's clock includes the copy, so work that
is still queued delays it. The times that the kernel's process reports must agree with that clock.
Copies are judged at random; before that, they are compared with the worker's memory again.
Races on a CPU are in `cpu_race`.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from opforge.cases.tensors import Bytes, Renewal, owned_copy, tensor_from_row, words_of
from opforge.judge.batch import BatchEntry
from opforge.judge.kernel_worker import KernelWorker, WorkerDiedError
from opforge.judge.reference.aten import CallOutcome
from opforge.judge.timing.measurement import FILL_SLACK_NS, Measurement, Wait
from opforge.judge.timing.result_check import matches_report, reported_parts, spanned_elements
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.procs import linux
from opforge.runtime.trees import map_instances
from opforge.sandbox.guest.cpu_timed_calls import result_parts
from opforge.sandbox.guest.device_memory import MappedMemory
from opforge.sandbox.guest.timed_calls import rehearsal_calls
from opforge.sandbox.host.reply import (
    AllocateReply,
    CallReply,
    EstimateReply,
    MalformedReplyError,
    MemoryLocation,
    ReportedTensor,
    ResultReply,
    RunReply,
    is_time,
    locations,
    raised_text,
    reply_fields,
)
from opforge.sandbox.host.request import AllocateRequest, ResultRequest, TimedCase, WorkerRequest

_ROUNDS_PER_CLOCK_SAMPLE = 4
"""Device clocks are sampled once in this many rounds."""
_JUDGE_PROBABILITY = 0.4
"""Share of the kernel's blocks with a judged result."""
_MAX_CHEAP_BYTES = 16 << 20
_MAX_CHEAP_TENSORS = 64
"""Calls above either limit are judged less often: copying a result takes longer than timing it."""
_COSTLY_JUDGE_PROBABILITY = 0.15
_MAX_TENSORS_OF_SETS = 1024
_ALWAYS_ALLOWED_SETS = 4
"""Sets of inputs that are always allowed.

More sets have at most `_MAX_TENSORS_OF_SETS` tensors together. Each tensor is filled separately.
"""
_FIRST_CALLS = 8
_MAX_DEVICE_BYTES = 1 << 30
_BLOCK_NS = 2_000_000
_MAX_CALLS = 64
_SYNC_CALLS = 8
_UNTIMED_SETS = 8
"""Sets of inputs for calls that are not timed."""
_MIN_PASS_NS = 500_000
"""Minimum GPU time of a pass of calls.

Two processes, and the judge's clock, cannot time shorter passes precisely.
"""
_MAX_PASS_NS = 20_000_000
_MAX_PASS_CALLS = 144
"""In graphs of more than about 150 launches each launch takes longer, by 0.15 µs on an H200."""
_SIZE_CHECK_ROUND = 2
"""After this round, and after the last one, blocks too short for their calls are set up again."""
_MAX_WAIT_SHARE = 0.03
"""Share of a block that a side may wait for a core; above it, the round is set aside."""

PartBytes = list[bytearray | int | None]
"""Bytes read of each part of a result; None for parts that cannot be read."""


@dataclass(frozen=True)
class ResultJudge:
    """Callbacks that judge the results of timed calls."""

    expected: Callable[[int], CallOutcome]
    """Returns ATen's answer to contents with a seed; raises BaselineError where ATen raises."""
    judge: Callable[[CallReply, Bytes, int, CallOutcome], Verdict]
    """Judges a reply to contents with a seed; the tensors of the reply lie in the bytes."""
    require_in_domain: Callable[[int], None]
    """Raises BaselineError where contents with a seed are at the edge of ATen's domain.

    Rounding decides there what is right.
    """


@dataclass(frozen=True)
class CallTimes:
    """Time of a call on one side."""

    device_ns: float
    call_ns: float

    @property
    def max_pass_ns(self) -> float:
        """Return an upper bound on its time in a pass: the call time includes the device time."""
        return min(self.device_ns, self.call_ns)


class BaselineError(Exception):
    """ATen's worker was lost while it was timed, or ATen raised on the contents of timed calls.

    Also raised where ATen raises one rounding step away from these contents.
    """


class WrongOutputError(RejectedError):
    """An output of a timed call is wrong, on contents with a seed."""

    def __init__(self, reason: str, seed: int) -> None:
        super().__init__(VerdictKind.CHEATED, f"an output of a timed call is wrong: {reason}")
        self.seed = seed


class KernelRaisedError(RejectedError):
    """The kernel raised in a timed call."""


@dataclass
class Side:
    """One side of a race: ATen or the kernel."""

    worker: KernelWorker
    is_kernel: bool
    has_calls: bool = False

    def ask(self, request: WorkerRequest | dict[str, Any], calls: int = 1) -> dict[str, Any]:
        """Send the worker a request for ``calls`` calls and return its answer."""
        self.worker.begin(request)
        return self.answer(calls)

    def pause_and_wait(self) -> None:
        """Stop the worker. If ATen's worker does not stop, the kernel is not at fault."""
        try:
            self.worker.pause_and_wait()
        except WorkerDiedError as death:
            if self.is_kernel:
                raise
            raise BaselineError(f"it died: {death}") from None

    def answer(self, calls: int = 1) -> dict[str, Any]:
        """Return the worker's answer.

        An exception of ATen's ends the race; an exception of the kernel's is its verdict.
        """
        try:
            reply = self.worker.answer(cases=calls)
        except WorkerDiedError as death:
            if self.is_kernel:
                raise
            raise BaselineError(f"it died: {death}") from None
        fields = reply_fields(reply)
        if (text := raised_text(fields)) is None:
            return fields
        if self.is_kernel:
            raise KernelRaisedError(VerdictKind.WRONG, f"raised in a timed call: {text}")
        raise BaselineError(f"it raised {text}")


class GpuRace:
    """A race over one case. Its operator may write to inputs."""

    def __init__(
        self,
        kernel: KernelWorker,
        baseline: KernelWorker,
        op: str,
        entry: BatchEntry,
        judging: ResultJudge | None,
        device: torch.device,
        *,
        writes_inputs: bool,
        race_s: float,
        sample_device: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._aten = Side(kernel, is_kernel=True), Side(baseline, is_kernel=False)
        self._sides = (self._aten, self._kernel)
        self._timed = TimedCase(op, entry.request(), str(device))
        self._judging = judging
        self._device = device
        self._race_s = race_s
        inputs = [
            owned_copy(tensor_from_row(entry.call.buffer, row), torch.device(row[6]) if row[6] else device)
            for row in entry.input_rows
        ]
        self._renewals = [Renewal(words_of(t), t.dtype, positions=entry.call.may_hold_indices) for t in inputs]
        self._input_bytes = [t.untyped_storage().nbytes() for t in inputs]
        self._parts = result_parts(entry.answer.result)
        results = [part for part in self._parts if isinstance(part, torch.Tensor)]
        self._call_bytes = max(1, sum(self._input_bytes) + sum(t.nbytes for t in results))
        self._call_tensors = max(1, len(inputs))
        self._is_costly = self._call_bytes > _MAX_CHEAP_BYTES or self._call_tensors > _MAX_CHEAP_TENSORS
        self._writes_inputs = writes_inputs
        self._sample_device = sample_device
        self._mapped: dict[bool, MappedMemory] = {}
        """Mapped memory, by `Side.is_kernel`."""
        self._targets: dict[bool, list[list[Any]]] = {}
        """Location of each input in each set, by side: mapped memory, or an address on the host."""
        self._captured: dict[bool, list[Any]] = {}
        """Locations that each side reports for the results of captured calls."""
        self._seeds: list[int] = []
        """Seeds of the contents that both sides get in the current round."""
        self._contents: list[list[torch.Tensor]] = []
        """Contents of each input in each set, as last written."""
        self._cores: set[int] = set()
        self._sets = self._calls = 1
        self._random = random.SystemRandom()
        self.notes: list[str] = []
        self._method = "graph"
        if any(t.numel() and not t.is_cuda for t in inputs):
            self._use_call_times("a CUDA graph keeps what inputs on the host held when it was captured")

    def run(self) -> dict[str, Any]:
        """Return the times of both sides, with their ratio and its 95 % interval."""
        cores = os.sched_getaffinity(0)
        self._cores = self._choose_core(cores)
        try:
            measurements = self._time_blocks()
        finally:
            for side in self._sides:
                side.worker.resume()
                side.worker.pin_to_cores(cores)
            self._unmap()
        for measurement in measurements:
            measurement.check_clocks()
        self._both({"do": "clear"})
        return self._row(measurements)

    def _time_blocks(self) -> list[Measurement]:
        """Time blocks of both sides; resize blocks that prove too short for their calls."""
        times = self._first_times()
        while True:
            measurements = self._size_blocks(times)
            deadline = time.monotonic() + self._race_s
            order = list(self._sides)
            while active := [f for f in measurements if not f.done]:
                out_of_time = time.monotonic() > deadline
                for measurement in active:
                    measurement.done = measurement.next_round_is_last(out_of_time=out_of_time)
                if active[0].rounds % 2 == 0:
                    self._random.shuffle(order)
                else:
                    order.reverse()
                self._time_round(order, active)
                if measurements[0].rounds == _SIZE_CHECK_ROUND and self._too_short(measurements, times):
                    break
            if not self._too_short(measurements, times):
                return measurements
            times = _shorter_times(times, measurements)  # ends: blocks at least double, up to a limit

    def _too_short(self, measurements: list[Measurement], times: list[CallTimes]) -> bool:
        """Whether blocks are too short to time: calls were slow during sizing, and then fast."""
        device, call, _ = measurements
        shortest = _shorter_times(times, measurements)
        short = self._pass_calls(shortest) > 2 * device.calls
        return short or (self._method == "events" and self._calls_in_a_row(shortest) > 2 * call.calls)

    def _choose_core(self, cores: set[int]) -> set[int]:
        """Return one core other than the judge's; both sides share it, since cores differ."""
        return {self._random.choice(sorted(cores - {linux.current_core()}) or sorted(cores))}

    def _row(self, measurements: list[Measurement]) -> dict[str, Any]:
        rows = {measurement.name: measurement.row() for measurement in measurements}
        cache = "cold" if self.footprint_bytes >= _cold_cache_bytes(self._device) else "warm"
        rows["device"] |= {"method": self._method, "cache": cache}
        # with events, calls wait in a queue, and work on other streams goes unseen
        timed = "device" if self._method == "graph" else "call"
        first = rows[timed]
        headline = {"timed": timed, "kernel_us": first["kernel_us"], "aten_us": first["aten_us"]}
        interval = {"speedup": first["speedup"], "speedup_low": first["low"], "speedup_high": first["high"]}
        return {**headline, **interval, "rounds": first["rounds"], **rows}

    @property
    def footprint_bytes(self) -> int:
        """Return how many bytes the calls of a pass touch."""
        return int(self._call_bytes * self._sets)

    @property
    def input_sets(self) -> int:
        """Return how many calls of a pass have inputs of their own."""
        return self._sets

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of a call's results that the cache may still hold when a pass ends."""
        return _cold_cache_bytes(self._device) // 2 // self._calls

    @property
    def _max_sets(self) -> int:
        """Return the maximum number of sets of inputs."""
        fitting = max(1, _MAX_DEVICE_BYTES // self._call_bytes)
        return int(min(fitting, max(_ALWAYS_ALLOWED_SETS, _MAX_TENSORS_OF_SETS // self._call_tensors)))

    @property
    def _max_pass_calls(self) -> int:
        """Return the maximum number of calls in a pass.

        An operator that writes to inputs gets no set twice: a call would find what another wrote.
        """
        return min(self._max_sets, _MAX_PASS_CALLS) if self._writes_inputs else _MAX_PASS_CALLS

    def _first_times(self) -> list[CallTimes]:
        """Return first estimates of the call times of both sides."""
        for side in self._sides:  # before the first call: later ones start in timed calls
            side.worker.find_descendants()
        self._allocate(min(_FIRST_CALLS, self._max_pass_calls))
        for side in self._sides:  # not earlier: both sides set up their calls at the same time
            side.worker.pin_to_cores(self._cores)
        return [self._estimated_times(side) for side in self._sides]

    def _size_blocks(self, times: list[CallTimes]) -> list[Measurement]:
        """Set up the calls on both sides, as many as precise timing needs."""
        calls = self._pass_calls(times)
        self._unmap()
        self._map(self._allocate(calls))
        several = self._calls_in_a_row(times)
        return [
            Measurement("device", calls, max(t.call_ns for t in times) * calls, self._method),
            *(
                Measurement(name, count, secondary=True, warmup_calls=rehearsal_calls(self._sets, count))
                for name, count in (("call", several), ("sync", min(several, _SYNC_CALLS)))
            ),
        ]

    def _pass_calls(self, times: list[CallTimes]) -> int:
        quickest, slowest = (f(t.max_pass_ns for t in times) for f in (min, max))
        return _clamp(min(_MIN_PASS_NS / quickest, _MAX_PASS_NS / slowest) + 1, 1, self._max_pass_calls)

    def _calls_in_a_row(self, times: list[CallTimes]) -> int:
        slowest = max(t.call_ns for t in times)
        return _clamp(_BLOCK_NS / 4 / slowest, 1, max(1, min(_MAX_CALLS, self._sets - _UNTIMED_SETS)))

    def _allocate(self, calls: int) -> list[AllocateReply]:
        """Set up ``calls`` calls on both sides, timed by the same method; return the replies."""
        self._calls, self._sets = max(1, calls), min(calls, self._max_sets)
        cold_bytes = _cold_cache_bytes(self._device)
        flush_bytes = cold_bytes if self._call_bytes * self._sets >= cold_bytes else 0
        while True:
            graph, timed = self._method == "graph", None if self._kernel.has_calls else self._timed
            answers = self._both(AllocateRequest(calls, self._sets, graph, flush_bytes, timed), calls)
            replies = [AllocateReply.from_wire(answer, self._sets, len(self._renewals)) for answer in answers]
            self._kernel.has_calls = True
            failure = next((r.capture_failure for r in replies if r.capture_failure is not None), None)
            if failure is None or self._method == "events":
                return replies
            self._use_call_times(f"it cannot be captured as a CUDA graph: {failure}")

    def _both(self, request: WorkerRequest | dict[str, Any], calls: int = 1) -> list[dict[str, Any]]:
        """Send both sides an untimed request at the same time and return the replies."""
        for side in self._sides:
            side.worker.resume()
            side.worker.begin(request)
        replies: list[dict[str, Any]] = []
        failures: list[Exception] = []
        for side in self._sides:
            # read both in any case: an unread answer would be taken for the next one
            try:
                replies.append(side.answer(calls))
            except (RejectedError, MalformedReplyError, WorkerDiedError, BaselineError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return replies

    def _estimated_times(self, side: Side) -> CallTimes:
        """Return a side's estimate of its call times, capped by the judge's wait for it."""
        self._run_alone(side)
        began = time.perf_counter_ns()
        answer = side.ask({"do": "estimate"}, _FIRST_CALLS)
        waited_ns = float(time.perf_counter_ns() - began)
        reply = EstimateReply.from_wire(answer)
        return CallTimes(min(waited_ns, reply.device_ns), min(waited_ns, reply.call_ns))

    def _use_call_times(self, why: str) -> None:
        """Use the time of calls in a row for the headline instead of the device time."""
        self._method = "events"
        self.notes.append(f"calls in a row are timed, not the device's time, since {why}"[:400])

    def _map(self, replies: list[AllocateReply]) -> None:
        """Map the inputs of both sides, and keep the reported locations of their results."""
        for side, reply in zip(self._sides, replies, strict=True):
            self._mapped[side.is_kernel] = MappedMemory(self._device)
            sets = [self._map_inputs(side, places) for places in reply.inputs]
            self._targets[side.is_kernel] = [list(places) for places in zip(*sets, strict=True)]
            self._captured[side.is_kernel] = reply.results

    def _unmap(self) -> None:
        self._targets, self._captured = {}, {}
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped = {}

    def _map_inputs(self, side: Side, places: list[MemoryLocation | None]) -> list[torch.Tensor | int]:
        inputs: list[torch.Tensor | int] = []
        for place, nbytes, renewal in zip(places, self._input_bytes, self._renewals, strict=True):
            handle, offset = self._require_location(side, place, "inputs")
            if nbytes and bool(handle) != renewal.words.is_cuda:
                raise MalformedReplyError
            if not renewal.words.is_cuda:
                inputs.append(offset)
            elif not nbytes:
                inputs.append(renewal.words)
            else:
                inputs.append(self._map_range(side, handle, offset, nbytes, renewal.words.dtype))
        return inputs

    def _require_location(self, side: Side, location: MemoryLocation | None, kind: str) -> MemoryLocation:
        """Return a location, if the memory can be mapped."""
        if location is not None:
            return location
        reason = f"its {kind} lie in memory of the GPU that another process cannot map"
        if not side.is_kernel:
            raise BaselineError(f"{reason} (CUDA IPC is needed to time kernels)")
        raise RejectedError(
            VerdictKind.CONTRACT,
            f"{reason} (cudaMallocAsync, virtual memory): return tensors of torch's own allocator",
        )

    def _map_range(
        self, side: Side, handle: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        try:
            return self._mapped[side.is_kernel].tensor_at(handle, offset, nbytes, dtype)
        except OSError as error:
            if not side.is_kernel:
                raise BaselineError(f"its memory cannot be mapped: {error}") from None
            raise MalformedReplyError from None

    def _time_round(self, order: list[Side], active: list[Measurement]) -> None:
        for measurement in active:
            measurement.waits.append(Wait.NONE)
            self._seeds = drawn_seeds(min(measurement.calls, self._sets))
            self._contents = [renewal.contents(self._seeds) for renewal in self._renewals]
            for side in order:
                self._time_block(side, measurement)

    def _run_alone(self, side: Side) -> None:
        """Let one side run, with the other one stopped."""
        (self._aten if side is self._kernel else self._kernel).pause_and_wait()
        side.worker.resume()

    def _time_block(self, side: Side, measurement: Measurement) -> None:
        """Time a block of one side, copy the result of one call, and judge some of the copies."""
        self._note_fill(side, measurement, self._prepare(side, measurement))
        call = self._random.randrange(measurement.calls)
        worker = side.worker
        waited_ns = worker.waited_ns()
        worker.begin(measurement.block_request)
        began = time.perf_counter_ns()
        worker.resume()
        if (
            self._sample_device is not None and len(measurement.waits) % _ROUNDS_PER_CLOCK_SAMPLE == 0
        ):  # in both blocks of a round, or in none
            self._sample_device()  # while the block runs
        try:
            reply = RunReply.from_wire(side.answer(measurement.block_calls))
        except KernelRaisedError:
            self._require_aten_returns(measurement)
            raise
        side.pause_and_wait()
        copies = self._copy_results(side, measurement, call, reply)
        elapsed_ns = time.perf_counter_ns() - began
        waited_ns = max(0, worker.waited_ns() - waited_ns)
        reported_ns = reply.ns
        if not is_time(reported_ns):
            raise RejectedError(VerdictKind.CHEATED, f"says that a timed call took {reported_ns!r} ns")
        if waited_ns > _MAX_WAIT_SHARE * reported_ns * measurement.block_calls:
            measurement.waits[-1] = Wait.INCLUDED
        (measurement.kernel_ns if side.is_kernel else measurement.aten_ns).append(float(reported_ns))
        overhead_ns = elapsed_ns - reported_ns * measurement.block_calls
        (measurement.kernel_overhead_ns if side.is_kernel else measurement.aten_overhead_ns).append(overhead_ns)
        if side.is_kernel and self._judging is not None and self._is_judged(measurement):
            check_isolation(worker, self._cores)
            self._judge(side, measurement, call, copies)

    def _note_fill(self, side: Side, measurement: Measurement, took_ns: float) -> None:
        """Record how long it took to fill the inputs of a block.

        If it took long, something else kept the GPU busy.
        """
        (measurement.kernel_fill_ns if side.is_kernel else measurement.aten_fill_ns).append(took_ns)
        shortest_ns = min(measurement.kernel_fill_ns + measurement.aten_fill_ns)
        if took_ns > shortest_ns + FILL_SLACK_NS:
            measurement.waits[-1] = Wait.INCLUDED

    def _is_judged(self, measurement: Measurement) -> bool:
        """Whether to judge a result of this block: at random, and at least once per measurement."""
        judged = self._random.random() < (_COSTLY_JUDGE_PROBABILITY if self._is_costly else _JUDGE_PROBABILITY) or (
            measurement.done and not measurement.has_judged_result
        )
        measurement.has_judged_result |= judged
        return judged

    def _prepare(self, side: Side, measurement: Measurement) -> float:
        """Prepare a side for a block, stop it, and write the round's contents into its inputs.

        Returns how long the writing took on the GPU in ns.
        """
        if measurement.name == "device":
            self._run_alone(side)
            side.ask({"do": "warm up"}, measurement.calls)
        memory: list[torch.Tensor] = []
        contents: list[torch.Tensor] = []
        on_host: list[tuple[int, torch.Tensor]] = []
        for renewal, rows, targets in zip(self._renewals, self._contents, self._targets[side.is_kernel], strict=True):
            if renewal.words.is_cuda:
                memory += targets[: len(rows)]
                contents += rows
            elif len(renewal.words):
                on_host += zip(targets, rows, strict=False)
        for either in self._sides:
            either.pause_and_wait()
        for address, row in on_host:
            self._write_to_host(side, address, row)
        began = time.perf_counter_ns()
        if memory:
            torch._foreach_copy_(memory, contents)
        torch.cuda.synchronize(self._device)
        return time.perf_counter_ns() - began

    def _write_to_host(self, side: Side, address: int, contents: torch.Tensor) -> None:
        try:
            side.worker.write_memory(address, contents.contiguous().view(torch.uint8).numpy())
        except OSError:
            raise MalformedReplyError from None

    def _require_aten_returns(self, measurement: Measurement) -> None:
        """Give ATen the contents on which the kernel has raised.

        If ATen raises too, there or one rounding step away, the kernel is not at fault.
        """
        self._prepare(self._aten, measurement)
        self._aten.worker.resume()
        self._aten.ask(measurement.block_request, measurement.block_calls)
        if self._judging is not None:
            for seed in self._seeds:
                self._judging.require_in_domain(seed)

    def _copy_results(
        self, side: Side, measurement: Measurement, call: int, reply: RunReply
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Copy the GPU parts of a call's result, wait for it, and return (memory, copy) pairs."""
        is_captured = measurement.name == "device" and self._method == "graph"
        results = self._captured[side.is_kernel] if is_captured else reply.results
        places = locations(results, call, len(self._parts))
        copies: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for part, place in zip(self._parts, places, strict=True):
            if not isinstance(part, torch.Tensor) or not part.is_cuda or part.layout is not torch.strided:
                copies.append(None)
                continue
            handle, offset = self._require_location(side, place, "results")
            nbytes = spanned_elements(part.shape, part.stride()) * part.element_size()
            if nbytes and not handle:
                raise MalformedReplyError
            memory = self._map_range(side, handle, offset, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
            copies.append((memory, memory.clone()))
        torch.cuda.synchronize(self._device)
        return copies

    def _judge(
        self, side: Side, measurement: Measurement, call: int, copies: list[tuple[torch.Tensor, torch.Tensor] | None]
    ) -> None:
        """Judge the copied result of a timed call, and its inputs, while the worker is stopped.

        Then resume the worker and ask for the rest.
        """
        assert self._judging is not None  # noqa: S101  # `_time_block` calls it only when it judges
        number = call % self._sets
        seed = self._seeds[number]
        answer = self._judging.expected(seed)
        if not self._writes_inputs:
            for position, (targets, rows) in enumerate(zip(self._targets[side.is_kernel], self._contents, strict=True)):
                if isinstance(targets[number], torch.Tensor) and not torch.equal(targets[number], rows[number]):
                    raise RejectedError(VerdictKind.CONTRACT, f"a timed call changed its input {position}")
        if any(pair is not None and not torch.equal(*pair) for pair in copies):
            raise WrongOutputError("it changed after the calls were reported as done", seed)
        parts: PartBytes = [None if pair is None else bytearray(pair[1].cpu().numpy()) for pair in copies]
        parts = [
            None if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()) else part
            for value, part in zip(self._parts, parts, strict=True)
        ]
        side.worker.resume()
        with_inputs = self._timed.case.owns_storage and (self._writes_inputs or measurement.done)
        judge_reported_result(
            side,
            self._judging,
            call,
            seed,
            answer,
            parts,
            with_inputs=with_inputs,
            check_integrity=True,
            thorough=measurement.done,
            on_host=self._parts_captured_on_gpu() if measurement.name == "device" else (),
        )

    def _parts_captured_on_gpu(self) -> list[int]:
        """Return which parts of a result lie on the host, but on the GPU when ATen is captured.

        The state of a generator is one.
        """
        if not self._captured[False]:
            return []
        places = locations(self._captured[False], 0, len(self._parts))
        return [
            number
            for number, (part, place) in enumerate(zip(self._parts, places, strict=True))
            if isinstance(part, torch.Tensor) and not part.is_cuda and place is not None and place[0]
        ]


def judge_reported_result(
    side: Side,
    judging: ResultJudge,
    call: int,
    seed: int,
    answer: CallOutcome,
    observed_parts: PartBytes,
    *,
    with_inputs: bool,
    check_integrity: bool,
    thorough: bool,
    on_host: Iterable[int] = (),
) -> None:
    """Ask for the rest of a result, compare its elements with those that were read, and judge it.

    The parts numbered in ``on_host`` are judged as host tensors, wherever they lie.
    """
    answered = side.ask(ResultRequest(call, with_inputs, check_integrity, thorough))
    region = side.worker.config.results_region
    reply = ResultReply.from_wire(answered, region)
    if reply.tampered:
        raise RejectedError(VerdictKind.CHEATED, f"tampered with its process: {'; '.join(reply.tampered)}")
    result = reply.result
    if result.malformed:
        raise MalformedReplyError(result.malformed)
    contents = side.worker.copy_results([result])
    for part, reported in zip(observed_parts, reported_parts(result.returned), strict=False):
        if not matches_report(part, reported, contents, region.start):
            raise WrongOutputError("it was missing when the call returned", seed)
    verdict = judging.judge(_with_parts_on_host(result, on_host), contents, seed, answer)
    if not verdict.passed:
        raise WrongOutputError(verdict.reason, seed)


def _with_parts_on_host(reply: CallReply, on_host: Iterable[int]) -> CallReply:
    """Return a reply in which the tensors with these part numbers are on the host."""
    chosen = {id(part) for number, part in enumerate(reported_parts(reply.returned)) if number in on_host}

    def moved(tensor: ReportedTensor) -> ReportedTensor:
        return replace(tensor, device="cpu") if id(tensor) in chosen else tensor

    return replace(reply, returned=map_instances(reply.returned, ReportedTensor, moved)) if chosen else reply


def check_isolation(worker: KernelWorker, cores: set[int]) -> None:
    """Reject a kernel that started processes in timed calls or runs on cores it may not use."""
    before = set(worker.descendants)
    if new := set(worker.find_descendants()) - before:
        raise RejectedError(
            VerdictKind.CHEATED, f"left {len(new)} process(es) running that it had started in timed calls"
        )
    if worker.may_run_outside(cores):
        raise RejectedError(VerdictKind.CHEATED, "runs on other cores than the one on which it is timed")


def _shorter_times(times: list[CallTimes], measurements: list[Measurement]) -> list[CallTimes]:
    """Return the call times of ATen and of the kernel: the shorter of ``times`` and the figures."""
    device, call, _ = measurements
    medians = [(device.aten_ns, call.aten_ns), (device.kernel_ns, call.kernel_ns)]
    return [
        CallTimes(min(t.device_ns, device.median_ns(device_ns)), min(t.call_ns, call.median_ns(call_ns)))
        for t, (device_ns, call_ns) in zip(times, medians, strict=True)
    ]


def drawn_seeds(count: int) -> list[int]:
    """Return ``count`` unpredictable numbers from 1 to 2³⁰."""
    return [1 + (number >> 2) for number in struct.unpack(f"{count}I", os.urandom(4 * count))]


def _cold_cache_bytes(device: torch.device) -> int:
    """Return how many bytes calls must touch before a reused input has left the cache."""
    return 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def _clamp(value: float, low: int, high: int) -> int:
    return max(low, min(high, int(value)))
