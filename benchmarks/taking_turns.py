"""Let ATen and installed kernels take turns run by run, and compare their times in pairs.

A host that other programs share is faster and slower by turns. Two runs one after the other meet the same host.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from opforge.runtime import enabling
from opforge.runtime.native_slots import NativeSlot

Pairs = list[tuple[float, float]]
"""Milliseconds of a way and of ATen."""
_COLLECT_EVERY = 50


@contextmanager
def aten_in_place() -> Iterator[None]:
    """Take all native slots out of the dispatcher, and put them back. They keep what they know."""
    slots = [slot for slot in enabling._slots.values() if isinstance(slot, NativeSlot)]
    if len(slots) != len(enabling._slots):
        raise RuntimeError("only native slots can be put back")
    for slot in slots:
        slot._native.remove()
    try:
        yield
    finally:
        for slot in slots:
            slot._native.install(slot._python.name)


def settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """Return how long some work takes, the GPU's part included."""
    settle(device)
    begun = time.perf_counter()
    work()
    settle(device)
    return (time.perf_counter() - begun) * 1e3


def pair(way: Callable[[], float], aten: Callable[[], float], *, aten_first: bool) -> tuple[float, float]:
    """Return the times that two functions measure, ATen's without the slots."""

    def without_slots() -> float:
        with aten_in_place():
            return aten()

    if aten_first:
        took = without_slots()
        return way(), took
    return way(), without_slots()


def take_turns(
    way: Callable[[], Any], aten: Callable[[], Any], device: str, *, least: int, most: int, seconds: float
) -> Pairs:
    """Time a way and ATen in turns, and each of them first in every other pair."""
    pairs: Pairs = []
    end = time.monotonic() + seconds
    times = partial(milliseconds, way, device), partial(milliseconds, aten, device)
    gc.disable()
    try:
        while len(pairs) < least or (len(pairs) < most and time.monotonic() < end):
            if len(pairs) % _COLLECT_EVERY == 0:
                gc.collect()
            pairs.append(pair(*times, aten_first=len(pairs) % 2 == 0))
    finally:
        gc.enable()
    return pairs


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and an interval that holds it in 95 of 100 cases."""
    ordered, n = sorted(values), len(values)
    off = round(0.98 * n**0.5)
    return statistics.median(ordered), ordered[max(0, n // 2 - off)], ordered[min(n - 1, n // 2 + off)]


def ratio_text(pairs: Pairs) -> str:
    middle, low, high = interval([way / aten for way, aten in pairs])
    return f"{middle:.3f} [{low:.3f}, {high:.3f}] × ATen in {len(pairs)} pairs"
