"""Situations in which a kernel is called: the call is the same, the process around it differs.

An installed kernel is called below autograd, from any thread, with any default dtype.
"""

from __future__ import annotations

import os
import sys
from _thread import (  # cannot be replaced once bound, before any kernel is loaded
    LockType,
    allocate_lock,
    get_native_id,
    start_new_thread,
)
from collections.abc import Callable, Sequence
from contextlib import suppress
from sys import setprofile
from time import monotonic
from typing import Any

import numpy as np
import torch

from opforge.cases.tensors import flat_bytes, flat_storage, same_on_host

GRAD_MODE, REQUIRES_GRAD, INFERENCE_MODE, THREAD, THREADS, DEFAULT_DTYPE, LAZY_CLONE, KEPT_RESULTS, TORCH_THREADS = (
    "grad_mode", "requires_grad", "inference_mode", "thread", "threads", "default_dtype", "lazy_clone",
    "kept_results", "torch_threads",
)  # fmt: skip
SINGLE_CALL_SITUATIONS = (GRAD_MODE, REQUIRES_GRAD, INFERENCE_MODE, THREAD, DEFAULT_DTYPE, LAZY_CLONE, TORCH_THREADS)
SITUATIONS = (*SINGLE_CALL_SITUATIONS, THREADS, KEPT_RESULTS)
"""All situations; the last two make many calls."""
OTHER_DEFAULT_DTYPE = torch.float64
_TORCH_THREADS = 3
_ROUNDS, _CALLS = 6, 64
"""Rounds with two threads, and the most calls that the judged thread makes in each."""
_ROUNDS_S = 0.2
"""Time limit for all rounds."""
_THREAD_SWITCH_INTERVAL_S = 1e-6
"""Interval at which Python switches threads while two of them are in a kernel."""
_TURN_CALLS, _TURN_S = 4, 0.05
"""Calls of the first round, with threads alternating at each step; poll interval while waiting."""
_TURNS_S = 2.0
"""Time limit for alternating.

On a busy machine each step takes milliseconds, and a kernel may have thousands of steps.
"""
Function = Callable[..., Any]
Arguments = tuple[list[Any], dict[str, Any], list[torch.Tensor]]
"""Positional and named arguments of a call, and the tensors among them."""


def input_for(situation: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an input for a situation; a lazy clone stays lazy until something writes to it."""
    if situation == REQUIRES_GRAD and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.requires_grad_()
    return torch._lazy_clone(tensor) if situation == LAZY_CLONE else tensor  # noqa: SLF001  # no public name


def call_in(situation: str, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function in a situation, then restore the process."""
    match situation:
        case "grad_mode":
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # as for installed kernels
                return function(*args, **kwargs)
        case "inference_mode":
            with torch.inference_mode():
                return function(*args, **kwargs)
        case "thread":
            (answer,) = _run_in_threads([lambda: function(*args, **kwargs)])
            return answer()
        case "default_dtype":
            before = torch.get_default_dtype()
            torch.set_default_dtype(OTHER_DEFAULT_DTYPE)
            try:
                return function(*args, **kwargs)
            finally:
                if torch.get_default_dtype() == OTHER_DEFAULT_DTYPE:  # else the kernel changed it, which is reported
                    torch.set_default_dtype(before)
        case "torch_threads":
            threads = torch.get_num_threads()
            torch.set_num_threads(_TORCH_THREADS)
            try:
                return function(*args, **kwargs)
            finally:
                if torch.get_num_threads() == _TORCH_THREADS:
                    torch.set_num_threads(threads)
        case _:
            return function(*args, **kwargs)


def call_in_two_threads(function: Function, make_arguments: Callable[[], Arguments]) -> tuple[Any, list[torch.Tensor]]:
    """Call a function several times while another thread calls it on other contents.

    Returns one result and its inputs: the first result that differs from a call alone, if any. A
    correct result may differ by rounding, which the judge decides.
    """
    interval, end = sys.getswitchinterval(), monotonic() + _ROUNDS_S

    def switch_as_usual() -> None:
        sys.setswitchinterval(interval)

    sys.setswitchinterval(_THREAD_SWITCH_INTERVAL_S)
    try:
        args, kwargs, _ = make_arguments()
        alone = function(*args, **kwargs)
        for number in range(_ROUNDS):
            given = [make_arguments() for _ in range(_CALLS if number else _TURN_CALLS)]
            turns = None if number else _Turns()
            others = _with_other_contents(make_arguments())
            results = _while_others_call(function, given, others, end, turns, switch_as_usual)
            other = next((i for i, result in enumerate(results) if not _same(alone, result)), None)
            if other is not None or number == _ROUNDS - 1 or monotonic() > end:
                break
        return results[other or 0], given[other or 0][2]
    finally:
        switch_as_usual()


class _Turns:
    """Makes two threads alternate: each lets the other run whenever the kernel calls a C function.

    Without this, threads on a busy machine seldom overlap inside a call.
    """

    def __init__(self) -> None:
        self._locks = allocate_lock(), allocate_lock()
        self._over = False
        self.time_limit = monotonic() + _TURNS_S
        self._states: dict[int, int] = {}
        """By thread number, the open file with the thread's state."""
        for lock in self._locks:
            lock.acquire()

    def follow(self, number: int) -> None:
        """Make this thread alternate from now on; the second thread waits for its first turn."""
        try:
            self._states[number] = os.open(f"/proc/self/task/{get_native_id()}/stat", os.O_RDONLY)
        except OSError:
            self._states[number] = -1
        if number:
            self._locks[number].acquire()

        def step(_frame: Any, event: str, _arg: Any) -> None:
            if event != "c_call" or self._over:
                return
            self._over = monotonic() > self.time_limit
            _open(self._locks[1 - number])
            while not self._over and not self._locks[number].acquire(timeout=_TURN_S):
                if self._waits(1 - number):  # for a lock of the kernel that this thread holds
                    self._over = True

        setprofile(step)

    def _waits(self, number: int) -> bool:
        """Whether a thread has started and is not runnable, or has ended."""
        try:
            return number in self._states and _state(self._states[number]) != b"R"
        except OSError:
            return True

    def end(self) -> None:
        """Let both threads run freely."""
        self._over = True
        setprofile(None)
        for lock in self._locks:
            _open(lock)

    def close(self) -> None:
        for file in self._states.values():
            with suppress(OSError):
                os.close(file)


def _state(file: int) -> bytes:
    """Return the state letter of a thread from its stat file."""
    return os.pread(file, 512, 0).rpartition(b")")[2].split()[0]


def _open(lock: LockType) -> None:
    with suppress(RuntimeError):  # already open
        lock.release()


def _while_others_call(
    function: Function,
    given: Sequence[Arguments],
    others: Arguments,
    end: float,
    turns: _Turns | None,
    switch_as_usual: Callable[[], None],
) -> list[Any]:
    """Return the results of one thread's calls, made while another thread calls repeatedly.

    After the time limit they switch as usual: on a busy machine each switch takes milliseconds, and
    a kernel in Python may have thousands of them in a call.
    """
    done: list[bool] = []

    def judged() -> list[Any]:
        if turns is not None:
            turns.follow(0)
        try:
            return [
                function(*args, **kwargs) for i, (args, kwargs, _) in enumerate(given) if not i or monotonic() < end
            ]
        finally:
            if turns is not None:
                turns.end()
            done.append(True)

    def beside() -> None:
        if turns is not None:
            turns.follow(1)
        while not done:
            function(*others[0], **others[1])

    time_limit = end if turns is None else max(end, turns.time_limit)
    answer, _ = _run_in_threads([judged, beside], time_limit, switch_as_usual)
    if turns is not None:
        turns.close()
    results: list[Any] = answer()
    return results


def _run_in_threads(
    calls: Sequence[Function], time_limit: float = 0.0, after_limit: Callable[[], None] | None = None
) -> list[Function]:
    """Run each call in its own thread; return functions that return its result or raise.

    If threads still run at the time limit, ``after_limit`` is called once, and they go on.
    """
    answers: list[Function] = [_return_none] * len(calls)
    start, ends = allocate_lock(), [allocate_lock() for _ in calls]

    def run(number: int) -> None:
        try:
            with start:  # all threads wait here
                pass
            result = calls[number]()
            answers[number] = lambda: result
        except BaseException as error:  # noqa: BLE001  # raised again by the returned function
            answers[number] = _raising(error)
        finally:
            ends[number].release()

    start.acquire()
    for number, end in enumerate(ends):
        end.acquire()
        start_new_thread(run, (number,))
    start.release()
    for end in ends:
        while not end.acquire(timeout=-1 if after_limit is None else max(0.0, time_limit - monotonic())):
            if after_limit is not None:
                after_limit()
            after_limit = None
    return answers


def _return_none() -> Any:
    return None


def _raising(error: BaseException) -> Function:
    def answer() -> Any:
        raise error

    return answer


def _with_other_contents(given: Arguments) -> Arguments:
    """Reverse the contents of a call's floating-point tensors, or of all if there are none."""
    floats = [t for t in given[2] if t.is_floating_point() or t.is_complex()]
    for tensor in floats or given[2]:
        elements = flat_storage(tensor).view(-1, tensor.element_size())
        turned = np.ascontiguousarray(elements.cpu().numpy()[::-1])  # not by an operator under test
        elements.copy_(torch.from_numpy(turned))
    return given


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and same_on_host(flat_bytes(one), flat_bytes(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return True
