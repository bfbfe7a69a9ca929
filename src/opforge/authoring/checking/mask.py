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
_WHOLES = (256, 512, 2048)
"""Full sizes for comparison with parts of a call; the largest that is fast enough is used."""
_LONG_S = 0.1
_BUDGET_S, _FEW_WAYS = 5.0, 2
"""Seconds for starting checks beyond the first few; Triton's interpreter is slow."""
_SMALL = 3
_POISONS = (math.nan, 1e30, -1e30)
_Sizing = Callable[[Subject, Call, int, int], Call]


def check(subject: Subject) -> Findings:
    """Yield faults at sizes near those of blocks."""
    calls = [call for call in subject.first(torch.float32) if call.tensors and subject.sizes(call)]
    if not calls:
        yield skipped("mask", "no call has a tensor whose size can be changed")
        return
    ways = [(call, group) for call in calls[:3] for group in subject.sizes(call)[:3]]
    until = time.monotonic() + _BUDGET_S
    seen: set[str] = set()
    # Out-of-bounds writes corrupt the process, so they are checked first, in guarded memory only.
    for kind, what, fix in itertools.chain.from_iterable(_writes_at_sizes(subject, *way) for way in ways):
        if kind not in seen:
            seen.add(kind)
            yield _finding(kind, what, fix)
        if kind == "writes":
            return
    random = subject.is_random()
    in_time = (way for place, way in enumerate(ways) if place < _FEW_WAYS or time.monotonic() < until)
    for kind, what, fix in itertools.chain.from_iterable(_at_sizes(subject, *way, random=random) for way in in_time):
        if kind not in seen:
            seen.add(kind)
            yield _finding(kind, what, fix)


def _finding(kind: str, what: str, fix: str) -> Finding:
    """Return a finding; wrong values alone are not a memory fault."""
    if kind in ("unseen", "slow"):
        return note("mask", what)
    return failed("mask", what, fix, "" if kind == "values" else MEMORY)


def _writes_at_sizes(subject: Subject, call: Call, group: int) -> Iterator[tuple[str, str, str]]:
    for size in _SIZES:
        start = time.monotonic()
        yield from _writes(subject, _sized(subject, call, group, size))
        if time.monotonic() - start > 2 * _LONG_S:
            return


def _sized(subject: Subject, call: Call, group: int, size: int) -> Call:
    """Return a call with one size changed and the others small."""
    return subject.resized(call, lambda n: size if n == group else min(n, _SMALL + (n % 3)))


def _at_sizes(subject: Subject, call: Call, group: int, *, random: bool) -> Iterator[tuple[str, str, str]]:
    base: _Sizing = _sized if _takes(subject, _sized(subject, call, group, 64)) else _only
    if not _takes(subject, base(subject, call, group, 64)):
        return
    size = _whole(lambda n: subject.answer(base(subject, call, group, n)))
    if size != _WHOLES[-1]:
        yield (
            "slow",
            f"sizes above {size} of {subject.base}{call} were left out: a call takes too long, as in Triton's interpreter",
            "",
        )
    parts = None if random or subject.reference is not None else _parts(subject, base(subject, call, group, size), size)
    for size in [s for s in _SIZES if s < size]:
        one = base(subject, call, group, size)
        expected = _try(subject, one)
        if expected is None:
            continue
        if not random:
            yield from _reads(subject, one)
        if not random:
            yield from _against(subject, one, expected)
        if parts is not None:
            yield from _apart(subject, parts, size)


def _whole(run: Callable[[int], Any]) -> int:
    """Return the largest of the full sizes at which a call is fast enough."""
    for size, larger in itertools.pairwise(_WHOLES):
        start = time.monotonic()
        with contextlib.suppress(Exception):  # an unsupported size is no fault here
            run(size)
        if (time.monotonic() - start) * larger / size > _LONG_S:
            return size
    return _WHOLES[-1]


def _only(subject: Subject, call: Call, group: int, size: int) -> Call:
    """Return a call with one size changed and the others kept."""
    return subject.resized(call, lambda n: size if n == group else n)


def _takes(subject: Subject, call: Call) -> bool:
    return _try(subject, call) is not None


def _try(subject: Subject, call: Call) -> list[Any] | None:
    try:
        return subject.answer(call)
    except Exception:  # noqa: BLE001  # an unsupported size is no fault here
        return None


def _reads(subject: Subject, call: Call) -> Iterator[tuple[str, str, str]]:
    """Check whether the result depends on memory around the inputs."""
    with torch.no_grad():
        expected = subject.run(guards.laid_in(call, 0.0)[0])
        _leave_behind(expected, 77)
        again = subject.run(guards.laid_in(call, 0.0)[0])
        if words := differences(expected, again):
            what = f"the same call gives another answer each time, at this size: {words}, for {subject.base}{call}"
            yield "changes", what, fixes.UNKNOWN_MEMORY
            return
        for poison in _POISONS:
            laid, _rooms = guards.laid_in(call, poison)
            found = subject.run(laid)
            if words := differences(expected, found):
                yield (
                    "reads",
                    f"the answer depends on memory outside its arguments: {words} when they lie between values of {poison:g}, for {subject.base}{call}",
                    fixes.READS,
                )
                return


def _leave_behind(values: list[Any], number: int) -> None:
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
    answers, rooms = [], []
    for fill in (math.nan, guards.MARK):
        laid, around = guards.laid_in(call, fill)
        subject.before_call(laid)
        try:
            value, own = guards.call_in_guards(subject.overload, laid, subject.device, fill)
        except (NotImplementedError, AttributeError) as error:  # not callable this way: no fault
            yield "unseen", f"what it writes of its results could not be watched: {short(error, 160)}", ""
            return
        except Exception:  # noqa: BLE001  # an unsupported size
            return
        answers.append(flat(value))
        rooms += [("a tensor that it allocated", room) for room in own] + [("an argument", room) for room in around]
    for which, room in rooms:
        if spoilt := room.spoilt():
            yield "writes", f"it writes outside {which}: {spoilt}, for {subject.base}{call}", fixes.WRITES
            return
    for place, (one, two) in enumerate(zip(*answers, strict=False)):
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and (words := _left(one, two)):
            yield (
                "unwritten",
                f"elements of result {place} are never written: {words}, for {subject.base}{call}",
                fixes.UNWRITTEN,
            )
            return


def _left(one: torch.Tensor, two: torch.Tensor) -> str:
    """Describe the elements that kept the prefilled value in both runs."""
    if one.shape != two.shape or not one.numel() or one.dtype == torch.bool:
        return ""
    before = guards.Guarded(one, one, 0, math.nan).unwritten() & guards.Guarded(two, two, 0, guards.MARK).unwritten()
    if not bool(before.any()):
        return ""
    index = [int(i) for i in before.nonzero()[0]]
    return f"{int(before.sum())} of {before.numel()}, the first at {index}"


def _against(subject: Subject, call: Call, found: list[Any]) -> Iterator[tuple[str, str, str]]:
    mine = call.copied()
    reference = subject.reference
    if reference is None:
        return
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        value = reference(*mine.args, **mine.kwargs)
        expected = [*(flat(value) if subject.returns else []), *subject.written_tensors(mine)]
        if not subject.returns and value is not None and subject.mutates:
            expected = flat(value)
        if words := differences(expected, found):
            yield (
                "values",
                f"another answer than the reference: {words}, for {subject.base}{call}",
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
        found = _try(subject, self.part(size))
        return None if found is None else differences([self.narrow(value, size) for value in self.answer], found)


def _parts(subject: Subject, whole: Call, size: int) -> _Parts | None:
    """Return the parts of a call if, at aligned sizes, they give parts of the result; else None."""
    answer = _try(subject, whole)
    if answer is None or any(torch.is_tensor(v) and size not in v.shape for v in answer):
        return None
    parts = _Parts(whole, answer, size, [size // 4, size // 2])
    return parts if all(parts.compared(subject, one) == "" for one in parts.aligned) else None


def _apart(subject: Subject, parts: _Parts, size: int) -> Iterator[tuple[str, str, str]]:
    if words := parts.compared(subject, size):
        fitting = " and ".join(map(str, parts.aligned))
        what = f"the first {size} elements of {parts.size} give another answer than {size} alone, while {fitting} alone do not"
        yield "values", f"{what}: {words}, for {subject.base}{parts.part(size)}", fixes.PARTS
