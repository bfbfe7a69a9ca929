"""The timed calls of one case. Each has memory and contents of its own; the judge says what they hold, when to go, and what to show.

On a GPU the calls of a pass are one CUDA graph, so that a pass is made of what the device does and nothing else; where a
kernel cannot be captured, they are queued behind a pause and timed by events. Call times are taken by the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns  # bound before any kernel is loaded
from typing import Any

import torch
from torch.cuda import CUDAGraph, Event, Stream, _sleep, synchronize
from torch.cuda import stream as on_stream

from opforge.cases.encoding import decode
from opforge.cases.materialise import Renewal, owned_copy, tensor_over, words_of

_WARM_UP = 3
_GUESSED_CALLS = 8
_REHEARSED = 8
_AHEAD_NS = 30_000
"""How long the device is kept busy while the host queues a graph."""
_GATHERED = 4096
"""Inputs of up to so many elements are filled by one launch for all calls."""
_MANY_CALLS = 64
_CYCLES_PER_NS = 1.7

Arguments = tuple[list[Any], dict[str, Any], list[torch.Tensor]]


class _CaptureError(Exception):
    """A kernel cannot be captured."""


def rehearsed_calls(sets: int, calls: int) -> int:
    """Return how many calls are made on spare sets before those that are timed one by one."""
    return max(0, min(sets - calls, _REHEARSED))


def short_calls(calls: int) -> int:
    """Return how many calls the short pass has that is timed beside a pass of so many; 0 for none."""
    return calls // 4 if calls >= _MANY_CALLS else 0


class Track:
    """Calls of a function on inputs of the same shapes, ready to be timed."""

    def __init__(self, function: Callable[..., Any], case: dict[str, Any], arena: Any, device: torch.device) -> None:
        self._function = function
        self._case = case
        self._device = device
        rows = _rows([case["args"], *case["kwargs"].values()])
        self._inputs = [_Input(row, arena, device, positions=case.get("positions", False)) for row in rows]
        self._sets: list[Arguments] = []
        self._count = 0
        self._kept: list[Any] = []
        self._captured: list[Any] = []
        self._graph: CUDAGraph | None = None
        self._short: CUDAGraph | None = None
        self._filling: CUDAGraph | None = None
        """Fills all sets, where their inputs are small."""
        self._stream = Stream(device) if device.type == "cuda" else None
        self._flush: torch.Tensor | None = None
        self._block: dict[str, Any] = {}

    def lay(self, calls: int, sets: int, *, graph: bool, cold: int) -> dict[str, Any]:
        """Have so many calls over so many sets of inputs, in new memory, and say how the device's time will be taken.

        With ``cold``, so many bytes are read before each pass on a GPU, so that its cache holds neither inputs nor results.
        """
        self._kept, self._captured = [], []
        self._graph = self._short = self._filling = None
        for given in self._inputs:
            given.forget()
        self._sets, old = [self._set() for _ in range(sets)], self._sets
        del old  # not before: the new ones are to lie elsewhere
        self._count = calls
        for given in self._inputs:
            given.renew([0] * sets)
        if self._stream is None:
            return {}
        if self._flush is None or self._flush.numel() != cold // 4:
            self._flush = torch.zeros(cold // 4, device=self._device) if cold else None
        small = self._inputs and all(given.small for given in self._inputs)
        self._filling = self._gather() if graph and small else None
        failure = self._capture() if graph else None
        return {"method": "events" if self._graph is None else "graph", "failure": failure}

    def guess(self) -> dict[str, Any]:
        """Warm up, and return first guesses at what a call takes."""
        self._put(self._count, 0)
        for _ in range(_WARM_UP):
            self._pipelined(min(self._count, 2))
        call_ns = min(self._pipelined(min(self._count, _GUESSED_CALLS)) for _ in range(2))
        guessed = {"call_ns": call_ns}
        return guessed if self._stream is None else {**guessed, "device_ns": self._device_pass(1, 0, 0)}

    def prepare(self, block: dict[str, Any]) -> None:
        """Put contents into the inputs of a block of calls, and wait until they are there."""
        self._block = block
        for given in self._inputs if block["seeds"] else ():
            given.renew(block["seeds"])
        if block["figure"] != "device":
            self._put(block["calls"], 0)
            self._kept = []
        self._wait()

    def go(self) -> float:
        """Run the block and return what a call took in ns."""
        block = self._block
        match block["figure"]:
            case "device":
                return self._device_pass(block["passes"], block["shift"], block["ahead_ns"])
            case "call":
                return self._pipelined(block["calls"])
            case "sync":
                return self._synchronous(block["calls"])
            case unknown:
                raise ValueError(f"unknown figure {unknown!r}")

    def shown(self, call: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the result of one of the calls that were timed last, and its inputs as they are now."""
        kept = self._captured if self._graph is not None and self._block["figure"] == "device" else self._kept
        return kept[call], self._sets[call % len(self._sets)][2]

    def _set(self) -> Arguments:
        """Return arguments with memory of their own."""
        made = [given.another() for given in self._inputs]
        waiting = iter(made)

        def tensor(_row: list[Any]) -> torch.Tensor:
            return next(waiting)

        args = decode(self._case["args"], tensor)
        return args, {n: decode(v, tensor) for n, v in self._case["kwargs"].items()}, made

    def _put(self, calls: int, shift: int) -> None:
        if self._filling is not None and calls >= len(self._sets):
            for given in self._inputs:
                given.stage(shift)
            self._filling.replay()
            return
        for given in self._inputs:
            given.put(min(calls, len(self._sets)), shift)

    def _gather(self) -> CUDAGraph:
        """Return what fills all sets from one stretch of memory for each input: a launch where it took as long as a pass to say what goes where."""
        graph = CUDAGraph()
        pairs = [given.staged() for given in self._inputs]
        self._wait()
        with on_stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for memory, stage in pairs:
                torch._foreach_copy_(memory, stage)
            graph.capture_end()
        self._wait()
        return graph

    def _pass(self, calls: int) -> list[Any]:
        function, sets = self._function, self._sets
        rounds = [*sets * (calls // len(sets)), *sets[: calls % len(sets)]]
        return [function(*args, **kwargs) for args, kwargs, _ in rounds]

    def _pipelined(self, calls: int) -> float:
        self._rehearse(calls)
        start = perf_counter_ns()
        self._kept = self._pass(calls)
        self._wait()
        return (perf_counter_ns() - start) / calls

    def _rehearse(self, calls: int) -> None:
        """Call on spare sets, if there are any, so that the first of the timed calls finds the processor as the others do."""
        for args, kwargs, _ in self._sets[calls:][: rehearsed_calls(len(self._sets), calls)]:
            self._function(*args, **kwargs)
        self._wait()

    def _synchronous(self, calls: int) -> float:
        function, kept = self._function, []
        self._rehearse(calls)
        start = perf_counter_ns()
        for args, kwargs, _ in self._sets[:calls]:
            kept.append(function(*args, **kwargs))
            synchronize()
        spent = perf_counter_ns() - start
        self._kept = kept
        return spent / calls

    def _device_pass(self, passes: int, shift: int, ahead_ns: float) -> float:
        """Run one pass that is not timed and some that are, each on other contents, and return what a call of those took.

        Where a short pass is timed beside each, the difference counts: what a pass costs beside its calls drops out.
        """
        short_ms = long_ms = 0.0
        marks = []
        for number in range(passes + 1):
            short = [self._marked(self._short, shift + number, ahead_ns)] if self._short is not None and number else []
            marks.append((short, self._marked(self._graph, shift + number, ahead_ns)))
        synchronize()
        for short, (before, after) in marks[1:]:
            long_ms += float(before.elapsed_time(after))
            short_ms += sum(float(b.elapsed_time(a)) for b, a in short)
        calls = self._count - (short_calls(self._count) if self._short is not None else 0)
        if long_ms <= short_ms:
            calls, short_ms = self._count, 0.0
        return (long_ms - short_ms) * 1e6 / (passes * calls)

    def _marked(self, graph: CUDAGraph | None, shift: int, ahead_ns: float) -> tuple[Event, Event]:
        """Queue a pass between two events."""
        self._put(self._count, shift)
        if self._flush is not None:
            self._flush.sum()
        before, after = Event(enable_timing=True), Event(enable_timing=True)
        _sleep(int((ahead_ns if graph is None else _AHEAD_NS) * _CYCLES_PER_NS))  # the pass is queued meanwhile
        before.record()
        if graph is None:
            self._kept = self._pass(self._count)
        else:
            graph.replay()
        after.record()
        return before, after

    def _capture(self) -> str | None:
        """Capture a pass as a graph, and a short one if there are many calls; what stands in the way is returned in words."""
        self._put(self._count, 0)
        self._wait()
        with on_stream(self._stream):
            self._pass(2)  # what a first call on a stream sets up is not to be part of the graph
        self._wait()
        try:
            if short := short_calls(self._count):
                self._short, _ = self._recorded(short)
            self._graph, self._captured = self._recorded(self._count)
        except _CaptureError as error:
            self._short = self._graph = None
            _new_generator_state(self._device)
            self._wait()
            return str(error)
        return None

    def _recorded(self, calls: int) -> tuple[CUDAGraph, list[Any]]:
        graph, failure, kept = CUDAGraph(), None, []
        with on_stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                kept = self._pass(calls)
            except Exception as error:  # noqa: BLE001  # whatever a kernel says to being captured
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


class _Input:
    """One input of the case: its memory in each call, and what that is to hold."""

    def __init__(self, row: list[Any], arena: Any, device: torch.device, *, positions: bool) -> None:
        self._first = owned_copy(tensor_over(arena, row), torch.device(row[6]) if row[6] else device)
        self._words = words_of(self._first)
        self._renewal = Renewal(self._words, self._first.dtype, positions=positions)
        self._memory: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._contents: torch.Tensor | None = None
        self._stage: torch.Tensor | None = None

    def another(self) -> torch.Tensor:
        """Return a tensor like the first, with memory of its own, which is filled from now on."""
        first = self._first
        memory = torch.empty_like(self._words)
        self._memory.append(memory)
        empty = torch.empty(0, dtype=first.dtype, device=first.device)
        return empty.set_(memory.untyped_storage(), first.storage_offset(), first.shape, first.stride())

    def forget(self) -> None:
        """Forget the memory of the calls so far."""
        self._memory, self._rows = [], []
        self._contents = self._stage = None

    def renew(self, seeds: list[int]) -> None:
        """Have contents for as many sets as there are seeds; of seed 0, those of the case."""
        if not len(self._words):
            return
        rows = self._renewal.contents(seeds) if any(seeds) else [self._words] * len(seeds)
        if self._contents is not None:
            self._contents[: len(seeds)] = torch.stack(rows)
        self._rows[: len(rows)] = rows

    @property
    def small(self) -> bool:
        """Whether it has something on a GPU, and little."""
        return bool(self._words.is_cuda) and 0 < len(self._words) <= _GATHERED

    def staged(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the memory of the calls, and beside each where its contents will lie."""
        self._contents = self._words.repeat(len(self._memory), 1)
        self._stage = self._contents.clone()
        return self._memory, list(self._stage.unbind())

    def stage(self, shift: int) -> None:
        """Lay contents out as ``put`` gives them to calls."""
        if self._stage is None or self._contents is None:
            raise RuntimeError("no stretch of memory is laid out")
        at = len(self._memory) - shift % len(self._memory)
        self._stage[:at] = self._contents[len(self._memory) - at :]
        self._stage[at:] = self._contents[: len(self._memory) - at]

    def put(self, calls: int, shift: int) -> None:
        """Fill the memory of the first calls; call ``i`` gets contents ``i + shift``, round and round."""
        if not len(self._words):
            return
        total = len(self._memory)
        rows = [self._rows[(call + shift) % total] for call in range(calls)]
        torch._foreach_copy_(self._memory[:calls], rows)


def _rows(tree: Any) -> list[list[Any]]:
    """Return the rows of the tensors in a case, in the order in which ``decode`` meets them."""
    found: list[list[Any]] = []
    decode(tree, found.append)
    return found


def _new_generator_state(device: torch.device) -> None:
    """Give the device's generator a state that does not wait for the end of a capture which has failed."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
