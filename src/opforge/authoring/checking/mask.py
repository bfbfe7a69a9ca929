"""Check unaligned sizes for out-of-bounds reads and writes, and for unwritten elements."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opforge.authoring.checking import fixes, guards
from opforge.authoring.checking.calls import Call, flat
from opforge.authoring.checking.comparing import differences
from opforge.authoring.checking.report import MEMORY, Finding
from opforge.authoring.checking.subject import Findings, Subject, failed, note, short, skipped

_SIZES = (1, 31, 33, 127, 129, 1000, 1025)
_FULL_SIZES = (256, 512, 2048)
"""Full sizes for comparison with parts of a call; the largest that is fast enough is used."""
_LONG_S = 0.1
_BUDGET_S, _MIN_CHECKED_WAYS = 5.0, 2
"""Seconds for starting checks beyond the first few; Triton's interpreter is slow."""
_SMALL_SIZE = 3
_POISONS = (math.nan, 1e30, -1e30)
_Resize = Callable[[Subject, Call, int, int], Call]


def check(subject: Subject) -> Findings:
    """Yield faults at sizes near those of blocks."""
    calls = [call for call in subject.first(torch.float32) if call.tensors and subject.sizes(call)]
    if not calls:
        yield skipped("mask", "no call has a tensor whose size can be changed")
        return
    ways = [(call, group) for call in calls[:3] for group in subject.sizes(call)[:3]]
    deadline = time.monotonic() + _BUDGET_S
    seen: set[str] = set()
    # Out-of-bounds writes corrupt the process, so they are checked first, in guarded memory only.
    for kind, what, fix in itertools.chain.from_iterable(_check_writes_at_sizes(subject, *way) for way in ways):
        if kind not in seen:
            seen.add(kind)
            yield _finding(kind, what, fix)
        if kind == "writes":
            return
    random = subject.is_random()
    in_time = (way for index, way in enumerate(ways) if index < _MIN_CHECKED_WAYS or time.monotonic() < deadline)
    for kind, what, fix in itertools.chain.from_iterable(
        _check_at_sizes(subject, *way, random=random) for way in in_time
    ):
        if kind not in seen:
            seen.add(kind)
            yield _finding(kind, what, fix)


def _finding(kind: str, what: str, fix: str) -> Finding:
    """Return a finding; wrong values alone are not a memory fault."""
    if kind in ("unseen", "slow"):
        return note("mask", what)
    return failed("mask", what, fix, "" if kind == "values" else MEMORY)


def _check_writes_at_sizes(subject: Subject, call: Call, group: int) -> Iterator[tuple[str, str, str]]:
    for size in _SIZES:
        start = time.monotonic()
        yield from _writes(subject, _resized_small(subject, call, group, size))
        if time.monotonic() - start > 2 * _LONG_S:
            return


def _resized_small(subject: Subject, call: Call, group: int, size: int) -> Call:
    """Return a call with one size changed and the others small."""
    return subject.resized(call, lambda n: size if n == group else min(n, _SMALL_SIZE + (n % 3)))


def _check_at_sizes(subject: Subject, call: Call, group: int, *, random: bool) -> Iterator[tuple[str, str, str]]:
    resize: _Resize = _resized_small if _accepts(subject, _resized_small(subject, call, group, 64)) else _resized_one
    if not _accepts(subject, resize(subject, call, group, 64)):
        return
    size = _whole(lambda n: subject.answer(resize(subject, call, group, n)))
    if size != _FULL_SIZES[-1]:
        yield (
            "slow",
            f"sizes above {size} of {subject.base}{call} were left out: a call takes too long, as in Triton's interpreter",
            "",
        )
    parts = (
        None if random or subject.reference is not None else _parts(subject, resize(subject, call, group, size), size)
    )
    for size in [s for s in _SIZES if s < size]:
        sized_call = resize(subject, call, group, size)
        expected = _try(subject, sized_call)
        if expected is None:
            continue
        if not random:
            yield from _check_reads(subject, sized_call)
        if not random:
            yield from _check_against_reference(subject, sized_call, expected)
        if parts is not None:
            yield from _apart(subject, parts, size)


def _whole(run: Callable[[int], Any]) -> int:
    """Return the largest of the full sizes at which a call is fast enough."""
    for size, larger in itertools.pairwise(_FULL_SIZES):
        start = time.monotonic()
        with contextlib.suppress(Exception):  # an unsupported size is no fault here
            run(size)
        if (time.monotonic() - start) * larger / size > _LONG_S:
            return size
    return _FULL_SIZES[-1]


def _resized_one(subject: Subject, call: Call, group: int, size: int) -> Call:
    """Return a call with one size changed and the others kept."""
    return subject.resized(call, lambda n: size if n == group else n)


def _accepts(subject: Subject, call: Call) -> bool:
    return _try(subject, call) is not None


def _try(subject: Subject, call: Call) -> list[Any] | None:
    try:
        return subject.answer(call)
    except Exception:  # noqa: BLE001  # an unsupported size is no fault here
        return None


def _check_reads(subject: Subject, call: Call) -> Iterator[tuple[str, str, str]]:
    """Check whether the result depends on memory around the inputs."""
    with torch.no_grad():
        expected = subject.run(guards.laid_in(call, 0.0)[0])
        _dirty_freed_memory(expected, 77)
        again = subject.run(guards.laid_in(call, 0.0)[0])
        if message := differences(expected, again):
            fault = f"the same call gives another answer each time, at this size: {message}, for {subject.base}{call}"
            yield "changes", fault, fixes.UNKNOWN_MEMORY
            return
        for poison in _POISONS:
            guarded_call, _buffers = guards.laid_in(call, poison)
            actual = subject.run(guarded_call)
            if message := differences(expected, actual):
                yield (
                    "reads",
                    f"the answer depends on memory outside its arguments: {message} when they lie between values of {poison:g}, for {subject.base}{call}",
                    fixes.READS,
                )
                return


def _dirty_freed_memory(values: list[Any], number: int) -> None:
    """Fill and free memory of the same sizes, so unwritten elements of later allocations show."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            torch.empty_like(value).fill_(number)


def _writes(subject: Subject, call: Call) -> Iterator[tuple[str, str, str]]:
    """Check the kernel's writes in and around its tensors.

    Memory is prefilled with NaN in the first run and with a number in the second.
    """
    if any(t.layout != torch.strided for t in call.tensors):
        return
    answers, buffers = [], []
    for fill in (math.nan, guards.MARK):
        guarded_call, argument_buffers = guards.laid_in(call, fill)
        subject.before_call(guarded_call)
        try:
            value, allocated_buffers = guards.call_in_guards(subject.overload, guarded_call, subject.device, fill)
        except (NotImplementedError, AttributeError) as error:  # not callable this way: no fault
            yield "unseen", f"what it writes of its results could not be watched: {short(error, 160)}", ""
            return
        except Exception:  # noqa: BLE001  # an unsupported size
            return
        answers.append(flat(value))
        buffers += [("a tensor that it allocated", buffer) for buffer in allocated_buffers] + [
            ("an argument", buffer) for buffer in argument_buffers
        ]
    for owner, buffer in buffers:
        if damage := buffer.spoilt():
            yield "writes", f"it writes outside {owner}: {damage}, for {subject.base}{call}", fixes.WRITES
            return
    for index, (first, second) in enumerate(zip(*answers, strict=False)):
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and (message := _left(first, second)):
            yield (
                "unwritten",
                f"elements of result {index} are never written: {message}, for {subject.base}{call}",
                fixes.UNWRITTEN,
            )
            return


def _left(first: torch.Tensor, second: torch.Tensor) -> str:
    """Describe the elements that kept the prefilled value in both runs."""
    if first.shape != second.shape or not first.numel() or first.dtype == torch.bool:
        return ""
    unwritten = (
        guards.Guarded(first, first, 0, math.nan).unwritten()
        & guards.Guarded(second, second, 0, guards.MARK).unwritten()
    )
    if not bool(unwritten.any()):
        return ""
    index = [int(i) for i in unwritten.nonzero()[0]]
    return f"{int(unwritten.sum())} of {unwritten.numel()}, the first at {index}"


def _check_against_reference(subject: Subject, call: Call, actual: list[Any]) -> Iterator[tuple[str, str, str]]:
    call_copy = call.copied()
    reference = subject.reference
    if reference is None:
        return
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        value = reference(*call_copy.args, **call_copy.kwargs)
        expected = [*(flat(value) if subject.returns else []), *subject.written_tensors(call_copy)]
        if not subject.returns and value is not None and subject.mutates:
            expected = flat(value)
        if message := differences(expected, actual):
            yield (
                "values",
                f"another answer than the reference: {message}, for {subject.base}{call}",
                fixes.VALUES,
            )


@dataclass(frozen=True)
class _Parts:
    """A call for which, at aligned sizes, a part of the inputs gives that part of the result."""

    whole: Call
    answer: list[Any]
    size: int
    aligned: list[int]

    def narrow(self, value: Any, size: int) -> Any:
        """Return the beginning of a tensor along the dimensions with the full size."""
        if isinstance(value, torch.Tensor):
            for dimension, length in enumerate(value.shape):
                if length == self.size:
                    value = value.narrow(dimension, 0, size)
        return value

    def part(self, size: int) -> Call:
        return self.whole.mapped(lambda t: self.narrow(t, size).contiguous())

    def compared(self, subject: Subject, size: int) -> str | None:
        """Describe how the part's result differs from that part of the result; None if refused."""
        actual = _try(subject, self.part(size))
        return None if actual is None else differences([self.narrow(value, size) for value in self.answer], actual)


def _parts(subject: Subject, whole: Call, size: int) -> _Parts | None:
    """Return the parts of a call if, at aligned sizes, they give parts of the result; else None."""
    answer = _try(subject, whole)
    if answer is None or any(torch.is_tensor(v) and size not in v.shape for v in answer):
        return None
    parts = _Parts(whole, answer, size, [size // 4, size // 2])
    return parts if all(parts.compared(subject, part_size) == "" for part_size in parts.aligned) else None


def _apart(subject: Subject, parts: _Parts, size: int) -> Iterator[tuple[str, str, str]]:
    if message := parts.compared(subject, size):
        aligned_sizes = " and ".join(map(str, parts.aligned))
        fault = f"the first {size} elements of {parts.size} give another answer than {size} alone, while {aligned_sizes} alone do not"
        yield "values", f"{fault}: {message}, for {subject.base}{parts.part(size)}", fixes.PARTS
