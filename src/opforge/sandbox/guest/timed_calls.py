"""The timed calls of one case on a GPU. The judge writes inputs and reads results in this process.

The calls of a pass are one CUDA graph, so a pass times only device work. A kernel that cannot be
captured is queued behind a pause and timed by events. Call times come from the host clock.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from time import perf_counter_ns  # bound before any kernel is loaded
from typing import Any

import torch
from torch.cuda import CUDAGraph, Event, Stream, _sleep, synchronize
from torch.cuda import stream as on_stream

from opforge.cases.tensors import flat_storage, owned_copy, tensor_from_row
from opforge.cases.wire import decode
from opforge.sandbox.guest.cpu_timed_calls import result_parts
from opforge.sandbox.guest.device_memory import MemoryLocator
from opforge.sandbox.host.reply import MemoryLocation

_WARM_UP = 3
_ESTIMATE_CALLS = 8
_MAX_REHEARSAL_CALLS = 8
_PAUSE_NS = 30_000
"""How long the device is kept busy while the host queues a graph."""
_MIN_CALLS_FOR_SHORT_PASS = 64
_CYCLES_PER_NS = 1.7

Arguments = tuple[list[Any], dict[str, Any], list[torch.Tensor]]


class _CaptureError(Exception):
    """A kernel cannot be captured."""


def rehearsal_calls(sets: int, calls: int) -> int:
    """Return the number of calls on spare input sets before calls are timed one by one."""
    return max(0, min(sets - calls, _MAX_REHEARSAL_CALLS))


def short_pass_calls(calls: int) -> int:
    """Return the number of calls in the short pass timed beside a full pass; 0 for none."""
    return calls // 4 if calls >= _MIN_CALLS_FOR_SHORT_PASS else 0


class TimedCalls:
    """Calls of a function on inputs of the same shapes, ready to be timed."""

    def __init__(self, function: Callable[..., Any], case: dict[str, Any], arena: Any, device: torch.device) -> None:
        self._function = function
        self._case = case
        self._device = device
        rows: list[list[Any]] = []
        decode([case["args"], *case["kwargs"].values()], rows.append)
        self._first = [
            owned_copy(tensor_from_row(arena, row), torch.device(row[6]) if row[6] else device) for row in rows
        ]
        self._sets: list[Arguments] = []
        self._others: list[Arguments] = []
        """Inputs for warm-up calls and the short pass; nothing sees the timed inputs before."""
        self._other_storages: list[torch.Tensor] = []
        self._first_storages: list[torch.Tensor] = []
        """Initial contents of each of those storages."""
        self._count = 0
        self._kept: list[Any] = []
        self._captured: list[Any] = []
        self._graph: CUDAGraph | None = None
        self._short: CUDAGraph | None = None
        self._stream = Stream(device) if device.type == "cuda" else None
        self._flush: torch.Tensor | None = None
        self._last_quantity = ""
        """The quantity timed last."""
        self._around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def call_instead(
        self, function: Callable[..., Any], around: Callable[[Any], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Call another function. ``around`` surrounds each block of calls, and gets their arguments."""
        self._function, self._around = function, around

    def allocate(self, calls: int, sets: int, *, graph: bool, flush_bytes: int) -> dict[str, Any]:
        """Prepare calls over several sets of inputs, in new memory.

        Returns the addresses, and the method that times the device. If ``flush_bytes`` is not zero, that
        many bytes are read before each pass on a GPU, so that its cache holds neither inputs nor
        results.
        """
        self._kept, self._captured = [], []
        self._graph = self._short = None
        old = self._sets, self._others
        self._sets, self._others = ([self.new_set() for _ in range(n)] for n in (sets, max(1, short_pass_calls(calls))))
        del old  # not earlier: the new sets need other addresses
        first = [flat_storage(tensor) for tensor in self._first]
        storages = [[flat_storage(tensor) for tensor in tensors] for _, _, tensors in self._sets]
        self._other_storages = [flat_storage(tensor) for _, _, tensors in self._others for tensor in tensors]
        self._first_storages = first * len(self._others)
        if first:  # few launches for all; torch has no public name for it
            torch._foreach_copy_(
                [*itertools.chain(*storages), *self._other_storages], first * (sets + len(self._others))
            )
        self._count = calls
        finder = MemoryLocator()
        where = {"inputs": [[finder.locate(memory) for memory in set_storages] for set_storages in storages]}
        if self._stream is None:
            return where
        if self._flush is None or self._flush.numel() != flush_bytes // 4:
            self._flush = torch.zeros(flush_bytes // 4, device=self._device) if flush_bytes else None
        failure = self._capture() if graph else None
        method = "events" if self._graph is None else "graph"
        return {**where, "method": method, "failure": failure, "results": _locations(self._captured)}

    def estimate(self) -> dict[str, Any]:
        """Return first estimates of the time of a call."""
        for _ in range(_WARM_UP):
            self._pipelined(min(self._count, 2))
        call_ns = min(self._pipelined(min(self._count, _ESTIMATE_CALLS)) for _ in range(2))
        estimate = {"call_ns": call_ns}
        return estimate if self._stream is None else {**estimate, "device_ns": self._device_pass(0)}

    def warm_up(self) -> dict[str, Any]:
        """Run a short pass so that the device is awake for the next one."""
        if self._other_storages:
            torch._foreach_copy_(self._other_storages, self._first_storages)
        if self._short is None:
            self._pass(self._others, len(self._others))
        else:
            self._short.replay()
        self._wait()
        return {}

    def run(self, block: dict[str, Any]) -> dict[str, Any]:
        """Run a block of calls; return the time of a call in ns, and where new results lie."""
        self._last_quantity = block["quantity"]
        match block["quantity"]:
            case "device":
                call_ns = self._device_pass(block["ahead_ns"])
            case "call":
                call_ns = self._pipelined(block["calls"])
            case "sync":
                call_ns = self._synchronous(block["calls"])
            case unknown:
                raise ValueError(f"unknown quantity {unknown!r}")
        return {"ns": call_ns, "results": _locations(self._kept)}

    def result(self, call: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the result of one of the calls timed last, and its inputs as they are now."""
        kept = self._captured if self._graph is not None and self._last_quantity == "device" else self._kept
        return kept[call], self._sets[call % len(self._sets)][2]

    def new_set(self) -> Arguments:
        """Return arguments in their own uninitialised memory."""
        tensors = [_like(tensor) for tensor in self._first]
        waiting = iter(tensors)

        def tensor(_row: list[Any]) -> torch.Tensor:
            return next(waiting)

        args = decode(self._case["args"], tensor)
        return args, {n: decode(v, tensor) for n, v in self._case["kwargs"].items()}, tensors

    def _pass(self, sets: list[Arguments], calls: int) -> list[Any]:
        function = self._function
        rounds = [*sets * (calls // len(sets)), *sets[: calls % len(sets)]]
        with self._around(sets):
            return [function(*args, **kwargs) for args, kwargs, _ in rounds]

    def _pipelined(self, calls: int) -> float:
        self._rehearse(calls)
        start = perf_counter_ns()
        self._kept = []  # freeing results is part of the work: a kernel may do something then
        self._kept = self._pass(self._sets, calls)
        self._wait()
        return (perf_counter_ns() - start) / calls

    def _rehearse(self, calls: int) -> None:
        """Call on spare sets, if any: the first timed call finds the processor as the rest do."""
        with self._around(self._sets):
            for args, kwargs, _ in self._sets[calls:][: rehearsal_calls(len(self._sets), calls)]:
                self._function(*args, **kwargs)
        self._wait()

    def _synchronous(self, calls: int) -> float:
        function, kept = self._function, []
        self._rehearse(calls)
        start = perf_counter_ns()
        self._kept = []
        with self._around(self._sets):
            for args, kwargs, _ in self._sets[:calls]:
                kept.append(function(*args, **kwargs))
                synchronize()
        spent = perf_counter_ns() - start
        self._kept = kept
        return spent / calls

    def _device_pass(self, ahead_ns: float) -> float:
        """Run a pass and return the time of one call.

        If a short pass is timed before it, the difference counts: the fixed cost of a pass cancels
        out.
        """
        short = (
            self._enqueue(self._short, ahead_ns) if self._short is not None and short_pass_calls(self._count) else None
        )
        before, after = self._enqueue(self._graph, ahead_ns)
        synchronize()
        calls, spent_ms = self._count, float(before.elapsed_time(after))
        if short is not None and (short_ms := float(short[0].elapsed_time(short[1]))) < spent_ms:
            calls, spent_ms = calls - short_pass_calls(calls), spent_ms - short_ms
        return spent_ms * 1e6 / calls

    def _enqueue(self, graph: CUDAGraph | None, ahead_ns: float) -> tuple[Event, Event]:
        """Queue a pass between two events."""
        if self._flush is not None:
            self._flush.sum()
        before, after = Event(enable_timing=True), Event(enable_timing=True)
        _sleep(int((ahead_ns if graph is None else _PAUSE_NS) * _CYCLES_PER_NS))  # the host queues the pass meanwhile
        before.record()
        if graph is None:
            self._kept = []
            self._kept = self._pass(self._sets, self._count)
        else:
            graph.replay()
        after.record()
        return before, after

    def _capture(self) -> str | None:
        """Capture a pass as a graph, and a short pass on other inputs; return why if it fails."""
        self._wait()
        with on_stream(self._stream):
            self._pass(self._others, 2)  # keeps the setup of a stream's first call out of the graph
        self._wait()
        try:
            self._short, _ = self._recorded(self._others, len(self._others))
            self._graph, self._captured = self._recorded(self._sets, self._count)
        except _CaptureError as error:
            self._short = self._graph = None
            _new_generator_state(self._device)
            self._wait()
            return str(error)
        return None

    def _recorded(self, sets: list[Arguments], calls: int) -> tuple[CUDAGraph, list[Any]]:
        graph, failure, kept = CUDAGraph(), None, []
        with on_stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                kept = self._pass(sets, calls)
            except Exception as error:  # noqa: BLE001  # a kernel may raise anything when captured
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            raise _CaptureError(f"{type(failure).__name__}: {failure}"[:300])
        return graph, kept

    def _wait(self) -> None:
        if self._stream is not None:
            synchronize()


GPU_KERNEL_CALLERS = tuple(vars(TimedCalls)[name].__code__ for name in ("_pass", "_rehearse", "_synchronous"))
"""Functions that call kernels, and no operator besides."""


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same geometry in its own uninitialised memory."""
    memory = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=tensor.device)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _locations(results: list[Any]) -> list[list[MemoryLocation | None]]:
    """Return the places of the tensors in results.

    None stands for a number, a tensor that is not strided, and memory that cannot be shared.
    """
    place_of = MemoryLocator().locate
    return [
        [
            place_of(p) if isinstance(p, torch.Tensor) and p.layout is torch.strided else None
            for p in result_parts(result)
        ]
        for result in results
    ]


def _new_generator_state(device: torch.device) -> None:
    """Give the device's generator a new state; the old one waits for a failed capture to end."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
