"""Race a kernel against ATen on a GPU: each in its own worker, short blocks in changing order, ratios with their intervals.

Three figures are raced: device time (what the GPU does), call time (what a caller waits for, many calls in a row)
and synchronous call time. Every timed call has contents of its own, results of timed calls are judged like any other,
and what the kernel's process says of its times must agree with the judge's own clock. While one side runs, the other
is stopped. Races on a CPU are in `host_race`.
"""

from __future__ import annotations

import math
import os
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge import processes
from opforge.judge.figures import Figure
from opforge.judge.replies import FORGED
from opforge.judge.trees import rows_of
from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.judge.workers import DeathError, KernelWorker
from opforge.sandbox.track import rehearsed_calls

_BUDGET_S = 1.0
_WATCHED = 4
"""In every so many rounds the device's clocks are looked at."""
_JUDGED = 0.4
"""The share of the kernel's blocks of which a result is judged."""
_LARGE = 16 << 20
_MANY_TENSORS = 64
"""Of calls above either, less is judged: to bring a result back takes longer than to time it."""
_SELDOM = 0.15
_MOST_TENSORS = 1024
_FEW_SETS = 4
"""Sets of inputs have no more tensors than that together, if they are more than some: each tensor gets its contents by itself."""
_FIRST_CALLS = 8
_MAX_DEVICE_BYTES = 1 << 30
_BLOCK_NS = 2_000_000
_MAX_CALLS = 64
_SYNC_CALLS = 8
_SPARE = 8
"""Sets of inputs for calls that are not timed."""
_PASS_NS = 300_000
"""The least that a pass of calls is to take on a GPU: shorter ones are not seen sharply from two processes."""
_MAX_PASS_NS = 20_000_000
_MAX_PASS_CALLS = 96
"""Graphs of more launches than some hundred and fifty take longer for each of them, by 0.15 µs on an H200."""
_BLOCK_PASSES = 2
_WAITED = 0.03
"""The share of a block that a side may have waited for a core; else the round is set aside."""

Hear = Callable[[dict[str, Any], int, bool], Finding]
"""Judges the result of a timed call on contents with a seed, and its inputs too or not."""
Inside = Callable[[int], None]
"""Raises BaselineError where contents with a seed are at the edge of what ATen takes: what is right there is rounding."""


class BaselineError(Exception):
    """ATen's own worker was lost while it was timed, or ATen raised on the contents of timed calls, or a rounding step beside them."""


class WrongOutputError(NotRightError):
    """An output of a timed call is wrong, on contents with a seed."""

    def __init__(self, reason: str, seed: int) -> None:
        super().__init__(Outcome.CHEATED, f"an output of a timed call is wrong: {reason}")
        self.seed = seed


class KernelRaisedError(NotRightError):
    """The kernel raised in a timed call."""


@dataclass
class Side:
    """One of the two that are raced."""

    worker: KernelWorker
    is_kernel: bool
    seeds: list[int] = field(default_factory=list)
    """Those of the contents that it has."""
    laid: bool = False

    def ask(self, request: dict[str, Any], calls: int = 1) -> dict[str, Any]:
        """Ask the worker about so many calls."""
        self.worker.begin(request)
        return self.answer(calls)

    def answer(self, calls: int = 1) -> dict[str, Any]:
        """Return the worker's answer; what ATen raises ends the race, what the kernel raises is its verdict."""
        try:
            reply = self.worker.answer(cases=calls)
        except DeathError as death:
            if self.is_kernel:
                raise
            raise BaselineError(f"it was lost: {death}") from None
        if not isinstance(reply, dict):
            raise NotRightError(Outcome.CONTRACT, FORGED)
        if "raised" in reply:
            *_, said = reply["raised"] if isinstance(reply["raised"], list) and reply["raised"] else [reply["raised"]]
            if self.is_kernel:
                raise KernelRaisedError(Outcome.WRONG, f"raised in a timed call: {said}")
            raise BaselineError(f"it raised {said}")
        return reply


class Race:
    """A race over one case, whose inputs and results take ``nbytes`` together, and whose operator may write to inputs."""

    def __init__(
        self,
        kernel: KernelWorker,
        baseline: KernelWorker,
        request: dict[str, Any],
        hear: Hear | None,
        device: torch.device,
        nbytes: int,
        *,
        writes: bool,
        inside: Inside | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._aten = Side(kernel, is_kernel=True), Side(baseline, is_kernel=False)
        self._sides = (self._aten, self._kernel)
        self._request = {**request, "device": str(device)}
        self._hear = hear
        self._inside = inside
        self._device = device
        self._nbytes = max(1, nbytes)
        self._tensors = max(1, sum(1 for _ in rows_of([request["case"]["args"], request["case"]["kwargs"]])))
        self._costly = nbytes > _LARGE or self._tensors > _MANY_TENSORS
        self._writes = writes
        self._watch = watch
        self._sets = 1
        self._chance = random.SystemRandom()
        self._method = "graph"
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        """Return the figures of both sides, with the ratio of one to the other and its 95 % interval."""
        cores = os.sched_getaffinity(0)
        try:
            self._share(self._core(cores))
            figures = self._lay()
            deadline = time.monotonic() + _BUDGET_S
            order = list(self._sides)
            while active := [f for f in figures if not f.done]:
                out_of_time = time.monotonic() > deadline
                for figure in active:
                    figure.done = figure.ends(out_of_time=out_of_time)
                if active[0].rounds % 2 == 0:
                    self._chance.shuffle(order)
                else:
                    order.reverse()
                self._round(order, active)
        finally:
            self._share(cores)
            for side in self._sides:
                side.worker.resume()
        for figure in figures:
            figure.clocks_agree()
        for side in self._sides:
            side.ask({"do": "clear"})
        return self._row(figures)

    def _core(self, cores: set[int]) -> set[int]:
        """Return one core that the judge is not on: both sides run there by turns, since cores are not alike."""
        return {self._chance.choice(sorted(cores - {processes.present_core()}) or sorted(cores))}

    def _share(self, cores: set[int]) -> None:
        for side in self._sides:
            side.worker.stay_on(cores)

    def _row(self, figures: list[Figure]) -> dict[str, Any]:
        rows = {figure.name: figure.row() for figure in figures}
        cache = "cold" if self.footprint >= _cold(self._device) else "warm"
        rows["device"] |= {"method": self._method, "cache": cache}
        first = rows[figures[0].name]
        headline = {"timed": figures[0].name, "kernel_us": first["kernel_us"], "aten_us": first["aten_us"]}
        interval = {"speedup": first["speedup"], "speedup_low": first["low"], "speedup_high": first["high"]}
        return {**headline, **interval, "rounds": first["rounds"], **rows}

    @property
    def footprint(self) -> int:
        """Return the bytes that the calls of a pass touch."""
        return self._nbytes * self._sets

    def _lay(self) -> list[Figure]:
        """Make the calls on both sides, as many as it takes to be timed sharply."""
        most = max(1, _MAX_DEVICE_BYTES // self._nbytes)
        most = min(most, max(_FEW_SETS, _MOST_TENSORS // self._tensors))
        limit = most if self._writes else _MAX_PASS_CALLS  # where sets are used again, a call finds what another wrote
        guesses = self._laid(min(_FIRST_CALLS, limit), most, guess=True)
        call_ns = max(g["call_ns"] for g in guesses)
        quickest, slowest = (f(g["device_ns"] for g in guesses) for f in (min, max))
        calls = _between(min(_PASS_NS / quickest, _MAX_PASS_NS / slowest) + 1, 1, min(_MAX_PASS_CALLS, limit))
        self._laid(calls, most)
        passes = _between(_BLOCK_PASSES * _PASS_NS / (calls * slowest), 1, _BLOCK_PASSES)
        several = _between(_BLOCK_NS / 4 / call_ns, 1, max(1, min(_MAX_CALLS, self._sets - _SPARE)))
        return [
            Figure("device", calls, passes, call_ns * calls, self._method),
            *(
                Figure(name, count, secondary=True, rehearsed=rehearsed_calls(self._sets, count))
                for name, count in (("call", several), ("sync", min(several, _SYNC_CALLS)))
            ),
        ]

    def _laid(self, calls: int, most: int, *, guess: bool = False) -> list[dict[str, float]]:
        """Have so many calls over at most so many sets of inputs on both sides, timed in the same way, with guesses if asked for."""
        self._sets = min(calls, most)
        cold = _cold(self._device) if self._nbytes * self._sets >= _cold(self._device) else 0
        request = {"do": "lay", "calls": calls, "sets": self._sets, "cold": cold, "guess": guess}
        replies = []
        while True:
            replies = [self._lay_side(side, {**request, "graph": self._method == "graph"}) for side in self._sides]
            failure = next((r.get("failure") for r in replies if r.get("method") == "events"), None)
            if failure is None or self._method == "events":
                break
            self._method = "events"
            self.notes.append(f"timed by events, since it cannot be captured as a CUDA graph: {failure}"[:400])
        return [{name: _positive(reply.get(name)) for name in ("call_ns", "device_ns")} for reply in replies]

    def _lay_side(self, side: Side, request: dict[str, Any]) -> dict[str, Any]:
        reply = side.ask(request if side.seeds else {**request, **self._request}, request["calls"])
        side.seeds = [0] * request["sets"]
        return reply

    def _round(self, order: list[Side], active: list[Figure]) -> None:
        for figure in active:
            figure.waited.append(False)
        for side in order:
            self._other(side).worker.pause()
            side.worker.resume()
            for figure in active:
                self._block(side, figure)

    def _other(self, side: Side) -> Side:
        return self._aten if side is self._kernel else self._kernel

    def _block(self, side: Side, figure: Figure) -> None:
        """Time a block of one side, and judge a result of it, of which call chance decides afterwards."""
        count = min(figure.calls, self._sets)
        side.seeds[:count] = drawn_seeds(count)
        shift = self._renew(side, figure, side.seeds[:count])
        waited, own_wait = side.worker.waited_ns(), processes.waited_ns(os.getpid())
        began = time.perf_counter_ns()
        side.worker.begin({"do": "go"})
        if self._watch is not None and figure.rounds % _WATCHED == 0:
            self._watch()  # while the block runs
        try:
            said = side.answer(figure.work).get("ns")
        except KernelRaisedError:
            self._ask_aten(figure)
            raise
        outside = time.perf_counter_ns() - began
        waited = max(0, side.worker.waited_ns() - waited)
        own_wait = max(0, processes.waited_ns(os.getpid()) - own_wait)
        if not isinstance(said, int | float) or not math.isfinite(said) or said <= 0:
            raise NotRightError(Outcome.CHEATED, f"says that a timed call took {said!r} ns")
        figure.waited[-1] |= waited > _WAITED * said * figure.work
        (figure.kernel_ns if side.is_kernel else figure.aten_ns).append(float(said))
        beside = outside - said * figure.work - waited - own_wait
        (figure.kernel_beside if side.is_kernel else figure.aten_beside).append(beside)
        if side.is_kernel and self._hear is not None and self._is_judged(figure):
            moved = shift + figure.passes if figure.name == "device" else 0
            own = self._request["case"]["own"] and (self._writes or figure.done)
            self._listen(side, self._chance.randrange(figure.calls), moved, own=own)

    def _is_judged(self, figure: Figure) -> bool:
        """Whether a result of the block that was just timed is judged: by chance, and one of each figure in any case."""
        judged = self._chance.random() < (_SELDOM if self._costly else _JUDGED) or (figure.done and not figure.judged)
        figure.judged |= judged
        return judged

    def _renew(self, side: Side, figure: Figure, seeds: list[int]) -> int:
        """Give the calls of the next block other contents than those of the last, and return by how much they have moved."""
        shift = self._chance.randrange(self._sets) if figure.name == "device" else 0
        side.ask(
            {
                "do": "prepare", "figure": figure.name, "calls": figure.calls, "passes": figure.passes,
                "ahead_ns": figure.ahead_ns, "seeds": seeds, "shift": shift,
            },
            figure.calls,
        )  # fmt: skip
        return shift

    def _ask_aten(self, figure: Figure) -> None:
        """Give ATen the contents on which the kernel has raised: where it raises too, there or close by, that is no fault of the kernel's."""
        self._aten.worker.resume()
        self._renew(self._aten, figure, self._kernel.seeds)
        self._aten.ask({"do": "go"}, figure.work)
        if self._inside is not None:
            for seed in self._kernel.seeds:
                self._inside(seed)

    def _listen(self, side: Side, call: int, shift: int, *, own: bool) -> None:
        """Judge the result of one of the calls that were just timed and, if asked for, its inputs, and what the kernel has done to its process."""
        reply = side.ask({"do": "show", "call": call, "own": own, "seals": True, "thorough": False})
        if tampered := reply.get("tampered"):
            raise NotRightError(Outcome.CHEATED, f"tampered with its process: {'; '.join(map(str, tampered))}")
        result = reply.get("result")
        if not isinstance(result, dict):
            raise NotRightError(Outcome.CONTRACT, FORGED)
        seed = side.seeds[(call + shift) % self._sets]
        finding = None if self._hear is None else self._hear(result, seed, own)
        if finding is not None and not finding.passed:
            raise WrongOutputError(finding.reason, seed)


def drawn_seeds(count: int) -> list[int]:
    """Return so many numbers from 1 to 2³⁰ that nobody can know before."""
    return [1 + (number >> 2) for number in struct.unpack(f"{count}I", os.urandom(4 * count))]


def _cold(device: torch.device) -> int:
    """Return how many bytes calls must touch before their inputs are touched again, for those to have left the cache."""
    return 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def _between(value: float, low: int, high: int) -> int:
    return max(low, min(high, int(value)))


def _positive(said: Any) -> float:
    """Return a time that a worker guessed, which is an untrusted word and sizes blocks only."""
    usable = isinstance(said, int | float) and math.isfinite(said) and said > 0
    return float(said) if usable else 1e6
