"""Measure a device's peaks: the best of several methods and repeats. Disturbances only slow them.

Bandwidths exclude the time of the smallest call of the same operator, so that a small working set
shows the speed of its cache and not the call overhead. Runs where the fork server has set one
thread.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.peaks import BandwidthCurve, Peaks
from opforge.runtime.devices import device_name

_KIB, _MIB = 1 << 10, 1 << 20
_WORKING_SET_BYTES = {
    "cpu": (16 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 128 * _MIB),
    "cuda": tuple(n * _MIB for n in (1, 4, 8, 16, 32, 64, 128, 256, 1024)),
}
_PRODUCT_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_FACTOR_SCALES = {"cpu": (1,), "cuda": (1, 0)}
"""Scales of the factors' contents. Zeros take a GPU less power, so that its clock may stay higher."""
_MEASUREMENT_PASSES = 2
_METHOD_BUDGET_S = 0.008
"""Time spent on one method at one size in each pass; it runs at least once."""
_OVERHEAD_ONLY_BYTES = 16
"""Bytes of a working set so small that a call takes its overhead only."""
_IN_PLACE = "in place"
_BLOCK_NS = 100_000
_MAX_PRODUCT_S = 0.1
"""A product that would take longer is not tried: it would be no peak."""
_KINDS_NOT_ON_CPU = frozenset({ArithmeticKind.TF32_MATMUL, ArithmeticKind.F8_MATMUL})
"""Kinds that a CPU does not have, or whose product ATen computes there one number at a time."""
_MIN_RATIO_TO_SMALLEST_CALL = 1.15
"""Factor by which a call must exceed the smallest one for the difference to mean something."""

Action = Callable[[], object]
Clock = Callable[[Action], float]
"""Returns the shortest time of an action in seconds."""


def measure(device: str) -> Peaks:
    """Return the peaks of a device; takes a few seconds."""
    kind = torch.device(device).type
    load = os.getloadavg()[0]
    with torch.no_grad():
        if kind == "cuda":
            torch.cuda.set_device(torch.device(device).index or 0)
            torch.set_float32_matmul_precision("highest")
            rates = _rates(device, kind, _graph_clock(1))  # before bandwidths: raises the clocks
            launch_us = 1e6 * _smallest_launch(device)
            clock: Clock = _graph_clock(None)
        else:
            rates, launch_us, clock = _rates(device, kind, _host_clock), None, _host_clock
        curve, in_place_curve = _bandwidth_curves(device, kind, clock)
        return Peaks(
            device=device_name(device),
            device_type=kind,
            bandwidth_curve=curve,
            in_place_curve=in_place_curve,
            rates=rates,
            launch_us=launch_us,
            call_us=1e6 * _smallest_call(device),
            measured_while_busy=kind == "cpu" and load > (os.cpu_count() or 1),
        )


def _host_clock(action: Action) -> float:
    """Time an action by this thread's CPU time, which stops while others use the core."""
    action()
    began = time.thread_time_ns()
    action()
    calls = max(1, min(1000, _BLOCK_NS // max(1, time.thread_time_ns() - began)))
    best = float("inf")
    until = time.thread_time() + _METHOD_BUDGET_S
    while best == float("inf") or time.thread_time() < until:
        began = time.thread_time_ns()
        for _ in range(calls):
            action()
        best = min(best, (time.thread_time_ns() - began) / calls)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # between blocks: calls alone are timed
    return best / 1e9


def _graph_clock(calls: int | None) -> Clock:
    """Time an action on a GPU by replaying a graph of ``calls`` of it.

    None stands for as many as take half a millisecond.
    """

    def clock(action: Action) -> float:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            action()  # an operator's setup at its first call cannot be captured
            call_s = _elapsed(action)
            count = calls or max(1, min(200, int(5e-4 / call_s)))
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for _ in range(count):
                action()
            graph.capture_end()
            graph.replay()
            return min(_elapsed(graph.replay) for _ in range(5)) / count

    return clock


def _elapsed(action: Action) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _smallest_launch(device: str) -> float:
    element = torch.ones(1, device=device)
    out = torch.empty_like(element)
    clock = _graph_clock(96)  # as in a race; beyond about 150 each launch takes longer
    return min(clock(lambda: torch.neg(element, out=out)), clock(element.neg_))


def _smallest_call(device: str) -> float:
    """Return the time of a minimal call, made as in a race: the overload, with a new result."""
    element = torch.ones(1, device=device)
    neg = torch.ops.aten.neg.default
    return _host_clock(lambda: neg(element))


def _bandwidth_methods(kind: str, memory: torch.Tensor, nbytes: int) -> Iterator[tuple[str, Action, int]]:
    """Yield methods to touch ``nbytes`` bytes: a name, an action, and how many bytes it moves."""
    count = nbytes // 4
    elements = memory[:count]
    half, other = memory[: count // 2], memory[count // 2 : count // 2 * 2]
    third = count // 3
    a, b, c = memory[:third], memory[third : 2 * third], memory[2 * third : 3 * third]
    scalar = torch.empty((), device=memory.device)
    yield "sum", lambda: torch.sum(elements, dim=0, out=scalar), 4 * count
    if kind == "cpu":
        yield "dot", lambda: torch.dot(half, other), 8 * (count // 2)
    else:
        columns = min(count, 4096)
        rows = memory[: count // columns * columns].view(-1, columns)
        vector, result = torch.ones(columns, device=memory.device), torch.empty(len(rows), device=memory.device)
        yield "mv", lambda: torch.mv(rows, vector, out=result), 4 * rows.numel()
    yield "copy", lambda: half.copy_(other), 8 * (count // 2)
    yield "zero", elements.zero_, 4 * count
    yield "triad", lambda: torch.add(a, b, alpha=2.0, out=c), 12 * third
    yield _IN_PLACE, elements.neg_, 8 * count


def _bandwidth_curves(device: str, kind: str, clock: Clock) -> tuple[BandwidthCurve, BandwidthCurve]:
    """Return bytes per second by size, for memory touched once and memory read and written back."""
    sizes = [size for size in _WORKING_SET_BYTES[kind] if size <= _usable_memory_bytes(device)]
    memory = torch.ones(sizes[-1] // 4, device=device)
    seconds: dict[tuple[str, int], float] = {}
    moves: dict[tuple[str, int], int] = {}
    for _ in range(_MEASUREMENT_PASSES):
        for size in (_OVERHEAD_ONLY_BYTES, *sizes):
            for name, action, moved in _bandwidth_methods(kind, memory, size):
                moves[name, size] = moved
                seconds[name, size] = min(clock(action), seconds.get((name, size), math.inf))
    once: dict[int, float] = {}
    twice: dict[int, float] = {}
    for (name, size), call_s in seconds.items():
        overhead_s = seconds[name, _OVERHEAD_ONLY_BYTES]
        if call_s > _MIN_RATIO_TO_SMALLEST_CALL * overhead_s:
            curve = twice if name == _IN_PLACE else once
            curve[size] = max(curve.get(size, 0.0), moves[name, size] / (call_s - overhead_s))
    return tuple(sorted(once.items())), tuple(sorted(twice.items()))


def _usable_memory_bytes(device: str) -> int:
    """Return how much memory may be used."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * _KIB // 4 if match else 64 * _MIB


def _rates(device: str, kind: str, clock: Clock) -> dict[ArithmeticKind, float]:
    """Return operations per second by kind of product, without kinds that device or torch lack."""
    rates: dict[ArithmeticKind, float] = {}
    for product_kind, make in _PRODUCTS.items():
        if kind == "cpu" and product_kind in _KINDS_NOT_ON_CPU:
            continue
        try:
            sizes, scales = _PRODUCT_SIZES[kind], _FACTOR_SCALES[kind]
            rates[product_kind] = max(rate for scale in scales for rate in _rate(make, device, sizes, scale, clock))
        except (RuntimeError, NotImplementedError, ValueError):
            continue
    return rates


ProductMaker = Callable[[int, str, int], Action]
"""Returns a product of square matrices of a size on a device. The last number scales the contents."""


def _rate(make: ProductMaker, device: str, sizes: tuple[int, ...], scale: int, clock: Clock) -> Iterator[float]:
    expected = 0.0
    for n in sizes:
        if expected > _MAX_PRODUCT_S:
            return
        seconds = clock(make(n, device, scale))
        yield 2 * n**3 / seconds
        expected = 8 * seconds


def _dense_product(dtype: torch.dtype) -> ProductMaker:
    def make(n: int, device: str, scale: int) -> Action:
        left, right = (scale * torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        return lambda: torch.mm(left, right, out=out)

    return make


def _tf32_product(n: int, device: str, scale: int) -> Action:
    product = _dense_product(torch.float32)(n, device, scale)

    def call() -> None:
        torch.set_float32_matmul_precision("high")
        try:
            product()
        finally:
            torch.set_float32_matmul_precision("highest")

    return call


def _f8_product(n: int, device: str, scale: int) -> Action:
    left, right = ((scale * torch.randn(n, n, device=device)).to(torch.float8_e4m3fn) for _ in range(2))
    unit = torch.ones((), device=device)
    columns: Any = right.t()
    return lambda: torch._scaled_mm(left, columns, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)  # noqa: SLF001


def _i8_product(n: int, device: str, scale: int) -> Action:
    left, right = (scale * torch.randint(-8, 8, (n, n), dtype=torch.int8, device=device) for _ in range(2))
    columns = right.t() if device != "cpu" else right
    return lambda: torch._int_mm(left, columns)  # noqa: SLF001


_PRODUCTS: dict[ArithmeticKind, ProductMaker] = {
    ArithmeticKind.BF16_MATMUL: _dense_product(torch.bfloat16),
    ArithmeticKind.F16_MATMUL: _dense_product(torch.float16),
    ArithmeticKind.F32_MATMUL: _dense_product(torch.float32),
    ArithmeticKind.TF32_MATMUL: _tf32_product,
    ArithmeticKind.F64_MATMUL: _dense_product(torch.float64),
    ArithmeticKind.F8_MATMUL: _f8_product,
    ArithmeticKind.I8_MATMUL: _i8_product,
}
