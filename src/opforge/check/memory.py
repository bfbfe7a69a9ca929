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

from opforge.check import fixes, guarded_memory
from opforge.check.differences import Expectation, first_difference
from opforge.check.findings import KIND_MEMORY, Finding, Findings, failed, note, skipped
from opforge.check.operator_call import OperatorCall, flat_results
from opforge.check.subject import Fault, Subject, attempt, describe_error

_UNALIGNED_SIZES = (1, 31, 33, 127, 129, 1000, 1025)
_FULL_SIZES = (256, 512, 2048)
"""Full sizes for comparison with parts of a call; the largest that is fast enough is used."""
_MAX_CALL_S = 0.1
"""CPU time, so that findings do not depend on what else the machine does."""
_BUDGET_S, _MIN_CHECKED_WAYS = 5.0, 2
"""Seconds of CPU time for starting checks beyond the first few; Triton's interpreter is slow."""
_SMALL_SIZE = 3
_POISONS = (math.nan, 1e30, -1e30)


def check(subject: Subject) -> Findings:
    """Yield faults at sizes near those of blocks."""
    calls = [call for call in subject.calls_with_dtypes(torch.float32) if call.tensors and subject.variable_sizes(call)]
    if not calls:
        yield skipped("mask", "no call has a tensor whose size can be changed")
        return
    ways = [(call, group) for call in calls[:3] for group in subject.variable_sizes(call)[:3]]
    deadline = time.process_time() + _BUDGET_S
    seen: set[str] = set()
    # Out-of-bounds writes corrupt the process, so they are checked first, in guarded memory only.
    for fault in itertools.chain.from_iterable(_check_writes_at_sizes(subject, *way) for way in ways):
        if fault.kind not in seen:
            seen.add(fault.kind)
            yield _finding(fault)
        if fault.kind == "writes":
            return
    random = subject.is_random()
    in_time = (way for index, way in enumerate(ways) if index < _MIN_CHECKED_WAYS or time.process_time() < deadline)
    counts = _SizeCounts()
    for fault in itertools.chain.from_iterable(
        _check_at_sizes(subject, *way, counts, random=random) for way in in_time
    ):
        if fault.kind not in seen:
            seen.add(fault.kind)
            yield _finding(fault)
    if counts.ways < len(ways):
        what = f"{counts.ways} of {len(ways)} sizes of its tensors were varied"
        yield note("mask", f"{what}: the limit of {_BUDGET_S:g} s of CPU time was reached")
    if not counts.checked and "unwritten" not in seen:
        yield skipped("mask", f"no other size is accepted: {counts.refusal}")


@dataclass
class _SizeCounts:
    """What was tried so far, and why sizes were left out."""

    ways: int = 0
    """Groups of equal sizes that were varied."""
    checked: int = 0
    """Sizes that the operator accepted."""
    refusal: str = ""
    """The first refusal of a size."""


def _finding(fault: Fault) -> Finding:
    """Return a finding; wrong values alone are not a memory fault."""
    if fault.kind in ("unseen", "slow", "refused"):
        return note("mask", fault.what)
    return failed("mask", fault.what, fault.fix, "" if fault.kind == "values" else KIND_MEMORY)


def _check_writes_at_sizes(subject: Subject, call: OperatorCall, group: int) -> Iterator[Fault]:
    for size in _UNALIGNED_SIZES:
        start = time.process_time()
        yield from _check_writes(subject, _resized_small(subject, call, group, size))
        if time.process_time() - start > 2 * _MAX_CALL_S:
            return


def _resized_small(subject: Subject, call: OperatorCall, group: int, size: int) -> OperatorCall:
    """Return a call with one size changed and the others small."""
    return subject.resized(call, lambda n: size if n == group else min(n, _SMALL_SIZE + (n % 3)))


def _check_at_sizes(
    subject: Subject, call: OperatorCall, group: int, counts: _SizeCounts, *, random: bool
) -> Iterator[Fault]:
    counts.ways += 1
    resize = _resized_small if subject.accepts(_resized_small(subject, call, group, 64)) else _resized_one
    refusal = attempt(subject.run_copy, resize(subject, call, group, 64))
    if isinstance(refusal, Exception):
        counts.refusal = (
            counts.refusal or f"64 for {group} in {subject.base_name}{call}: {describe_error(refusal, 160)}"
        )
        yield Fault("refused", f"a size was not varied, as the operator refuses {counts.refusal}")
        return
    full_size, reason = _largest_fast_size(lambda n: subject.run_copy(resize(subject, call, group, n)))
    if reason:
        yield Fault("slow", f"sizes above {full_size} for {group} in {subject.base_name}{call} were left out: {reason}")
    parts = (
        None
        if random or subject.reference is not None
        else _find_parts(subject, resize(subject, call, group, full_size), full_size)
    )
    for size in [s for s in _UNALIGNED_SIZES if s < full_size]:
        sized_call = resize(subject, call, group, size)
        results = attempt(subject.run_copy, sized_call)
        if isinstance(results, Exception):
            refused = f"{size} for {group} in {subject.base_name}{call}: {describe_error(results, 160)}"
            counts.refusal = counts.refusal or refused
            yield Fault("refused", f"sizes were left out, as the operator refuses {refused}")
            continue
        counts.checked += 1
        if not random:
            yield from _check_reads(subject, sized_call)
            yield from _check_against_reference(subject, sized_call, results)
        if parts is not None:
            yield from _check_part(subject, parts, size)


def _largest_fast_size(run: Callable[[int], Any]) -> tuple[int, str]:
    """Return the largest of the full sizes at which a call is fast enough, and why larger ones are left out."""
    for size, larger in itertools.pairwise(_FULL_SIZES):
        start = time.process_time()
        attempt(run, size)  # an unsupported size is no fault here
        seconds = time.process_time() - start
        if seconds * larger / size > _MAX_CALL_S:
            return size, (
                f"a call at {size} takes {seconds:.2g} s of CPU time, so one at {larger} is expected to exceed the "
                f"limit of {_MAX_CALL_S:g} s"
            )
    return _FULL_SIZES[-1], ""


def _resized_one(subject: Subject, call: OperatorCall, group: int, size: int) -> OperatorCall:
    """Return a call with one size changed and the others kept."""
    return subject.resized(call, lambda n: size if n == group else n)


def _check_reads(subject: Subject, call: OperatorCall) -> Iterator[Fault]:
    """Check whether the result depends on memory around the inputs."""
    with torch.no_grad():
        expected = Expectation(subject.run(guarded_memory.guard_arguments(call, 0.0)[0]), call, subject.run)
        _dirty_freed_memory(expected.results, 77)
        again = subject.run(guarded_memory.guard_arguments(call, 0.0)[0])
        if message := first_difference(expected, again):
            fault = f"the same call gives a different result each time, at this size: {message}"
            yield Fault("changes", f"{fault}, for {subject.base_name}{call}", fixes.UNINITIALISED_READ)
            return
        for poison in _POISONS:
            guarded_call, _buffers = guarded_memory.guard_arguments(call, poison)
            actual = subject.run(guarded_call)
            if message := first_difference(expected, actual):
                fault = f"the result depends on memory outside its arguments: {message}"
                where = f"when they are surrounded by {poison:g}, for {subject.base_name}{call}"
                yield Fault("reads", f"{fault} {where}", fixes.OUT_OF_BOUNDS_READ)
                return


def _dirty_freed_memory(values: list[Any], number: int) -> None:
    """Fill and free memory of the same sizes, so unwritten elements of later allocations show."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            torch.empty_like(value).fill_(number)


def _check_writes(subject: Subject, call: OperatorCall) -> Iterator[Fault]:
    """Check the kernel's writes in and around its tensors.

    Memory is prefilled with NaN in the first run and with a number in the second.
    """
    if any(t.layout != torch.strided for t in call.tensors):
        return
    answers, buffers = [], []
    for fill in (math.nan, guarded_memory.FILL_VALUE):
        guarded_call, argument_buffers = guarded_memory.guard_arguments(call, fill)
        subject.before_call(guarded_call)
        outcome = attempt(guarded_memory.call_guarded, subject.overload, guarded_call, subject.device, fill)
        if isinstance(outcome, NotImplementedError | AttributeError):  # not callable this way: no fault
            reason = describe_error(outcome, 160)
            yield Fault("unseen", f"its writes to its results could not be checked: {reason}")
        if isinstance(outcome, Exception):  # else an unsupported size
            return
        value, allocated_buffers = outcome
        answers.append(flat_results(value))
        buffers += [("a tensor that it allocated", buffer) for buffer in allocated_buffers]
        buffers += [("an argument", buffer) for buffer in argument_buffers]
    for owner, buffer in buffers:
        if damage := buffer.describe_damage():
            fault = f"it writes outside {owner}: {damage}, for {subject.base_name}{call}"
            yield Fault("writes", fault, fixes.OUT_OF_BOUNDS_WRITE)
            return
    for index, (first, second) in enumerate(zip(*answers, strict=False)):
        if (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and (message := _describe_unwritten(first, second))
        ):
            fault = f"elements of result {index} are never written: {message}, for {subject.base_name}{call}"
            yield Fault("unwritten", fault, fixes.UNWRITTEN_ELEMENTS)
            return


def _describe_unwritten(first: torch.Tensor, second: torch.Tensor) -> str:
    """Describe the elements that kept the prefilled value in both runs."""
    if first.shape != second.shape or not first.numel() or first.dtype == torch.bool:
        return ""
    unwritten = (
        guarded_memory.GuardedTensor(first, first, 0, math.nan).unwritten_mask()
        & guarded_memory.GuardedTensor(second, second, 0, guarded_memory.FILL_VALUE).unwritten_mask()
    )
    if not bool(unwritten.any()):
        return ""
    index = [int(i) for i in unwritten.nonzero()[0]]
    return f"{int(unwritten.sum())} of {unwritten.numel()}, the first at {index}"


def _check_against_reference(subject: Subject, call: OperatorCall, actual: list[Any]) -> Iterator[Fault]:
    reference = subject.reference
    if reference is None:
        return

    def run_reference(call: OperatorCall) -> list[Any]:
        value = reference(*call.args, **call.kwargs)
        if not subject.returns and value is not None and subject.mutates:
            return flat_results(value)
        return [*(flat_results(value) if subject.returns else []), *subject.written_tensors(call)]

    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        expected = Expectation(run_reference(call.copy()), call, run_reference)
        if message := first_difference(expected, actual):
            fault = f"a different result than the reference: {message}, for {subject.base_name}{call}"
            yield Fault("values", fault, fixes.WRONG_VALUES)


@dataclass(frozen=True)
class _PartialCalls:
    """A call for which, at aligned sizes, a part of the inputs gives that part of the result."""

    full_call: OperatorCall
    results: list[Any]
    size: int
    aligned: list[int]

    def narrow(self, value: Any, size: int) -> Any:
        """Return the beginning of a tensor along the dimensions with the full size."""
        if isinstance(value, torch.Tensor):
            for dimension, length in enumerate(value.shape):
                if length == self.size:
                    value = value.narrow(dimension, 0, size)
        return value

    def part(self, size: int) -> OperatorCall:
        return self.full_call.map_tensors(lambda t: self.narrow(t, size).contiguous())

    def describe_difference(self, subject: Subject, size: int) -> str | None:
        """Describe how the part's result differs from that part of the result; None if refused."""
        actual = attempt(subject.run_copy, self.part(size))
        if isinstance(actual, Exception):
            return None

        def narrowed(values: list[Any]) -> list[Any]:
            return [self.narrow(value, size) for value in values]

        expected = Expectation(narrowed(self.results), self.full_call, lambda call: narrowed(subject.run(call)))
        return first_difference(expected, actual)


def _find_parts(subject: Subject, full_call: OperatorCall, size: int) -> _PartialCalls | None:
    """Return the parts of a call if, at aligned sizes, they give parts of the result; else None."""
    answer = attempt(subject.run_copy, full_call)
    if isinstance(answer, Exception) or any(torch.is_tensor(v) and size not in v.shape for v in answer):
        return None
    parts = _PartialCalls(full_call, answer, size, [size // 4, size // 2])
    return parts if all(parts.describe_difference(subject, part_size) == "" for part_size in parts.aligned) else None


def _check_part(subject: Subject, parts: _PartialCalls, size: int) -> Iterator[Fault]:
    if message := parts.describe_difference(subject, size):
        aligned_sizes = " and ".join(map(str, parts.aligned))
        fault = (
            f"the first {size} elements of {parts.size} give a different result than {size} alone, but "
            f"{aligned_sizes} alone do not"
        )
        where = f"for {subject.base_name}{parts.part(size)}"
        yield Fault("values", f"{fault}: {message}, {where}", fixes.WRONG_PARTS)
