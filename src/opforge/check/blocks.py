"""Check the work per program of Triton kernels, from their launches on a larger input."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opforge.check import fixes
from opforge.check.findings import Findings, note, skipped
from opforge.check.operator_call import OperatorCall
from opforge.check.subject import Subject, attempt, describe_error

_TARGET_ELEMENTS = 1 << 20
_MIN_ELEMENTS_PER_PROGRAM, _MIN_JUDGED_PROGRAMS = 128, 1024
_MAX_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: number of programs, constants, and number of elements."""

    kernel: str
    programs: int
    constants: dict[str, Any]
    elements: int


def check(subject: Subject) -> Findings:
    """Yield launches with too little or too much work per program."""
    call = _enlarged_call(subject)
    if call is None:
        yield skipped("blocks", "no call has a tensor with a size above 1, so none could be made larger")
        return
    with _recording_launches(run=not subject.interpreted) as launches:
        result = attempt(subject.run_copy, call)  # kernels are not run in the interpreter: values mean nothing
    if not launches:
        refused = (
            f"{subject.base_name}{call} is refused: {describe_error(result, 160)}"
            if isinstance(result, Exception)
            else ""
        )
        yield skipped("blocks", refused or "it launches no Triton kernel")
    for launch in {one.kernel: one for one in reversed(launches)}.values():
        yield from _check_launch(launch)


def _check_launch(launch: Launch) -> Findings:
    per_program = launch.elements / max(launch.programs, 1)
    names = ", ".join(f"{name}={value}" for name, value in launch.constants.items())
    largest = max((v for v in launch.constants.values() if isinstance(v, int) and v > 0 and not v & (v - 1)), default=0)
    description = f"{launch.kernel} ({names}) is launched with {launch.programs} programs on {launch.elements} elements"
    if per_program < _MIN_ELEMENTS_PER_PROGRAM and launch.programs >= _MIN_JUDGED_PROGRAMS:
        yield note(
            "blocks",
            f"{description}: {per_program:.0f} elements each, which is very little",
            fixes.SMALL_BLOCKS,
        )
    elif largest > _MAX_BLOCK_ELEMENTS:
        yield note(
            "blocks",
            f"{description}: a block of {largest} does not fit into registers",
            fixes.LARGE_BLOCKS,
        )


def _enlarged_call(subject: Subject) -> OperatorCall | None:
    """Scale a call's sizes by one factor to about a million elements; None if no call allows it."""
    for call in subject.calls_with_dtypes(torch.float32)[:3]:
        largest = max((t.numel() for t in call.tensors), default=0)
        dimensions = max((sum(n > 1 for n in t.shape) for t in call.tensors), default=0)
        if not largest or not dimensions:
            continue
        factor = (_TARGET_ELEMENTS / largest) ** (1 / dimensions)
        return subject.resized(call, functools.partial(_scaled, factor))
    return None


def _scaled(factor: float, size: int) -> int:
    return max(2, round(size * factor))


@contextlib.contextmanager
def _recording_launches(*, run: bool) -> Iterator[list[Launch]]:
    """List launches; ``run=False`` skips interpreted kernels (a millisecond per program)."""
    launches: list[Launch] = []
    try:
        from triton.runtime import interpreter, jit
    except ImportError:
        yield launches
        return
    executor, compiled = interpreter.GridExecutor.__call__, jit.JITFunction.run

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(_launch(self.fn.__name__, self.arg_names, self.constexprs, self.grid, args, kwargs))
        if run:
            executor(self, *args, **kwargs)

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        constants = [p.name for p in self.params if p.is_constexpr]
        launches.append(_launch(self.__name__, self.arg_names, constants, grid, args, kwargs))
        return compiled(self, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.GridExecutor.__call__, jit.JITFunction.run = interpreted, launched
    try:
        yield launches
    finally:
        interpreter.GridExecutor.__call__, jit.JITFunction.run = executor, compiled


def _launch(
    name: str, names: list[str], constants: list[str], grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch:
    arguments = dict(zip(names, args, strict=False)) | kwargs
    shape = grid(arguments) if callable(grid) else grid
    shape = shape if isinstance(shape, (tuple, list)) else (shape,)
    elements = max((t.numel() for t in arguments.values() if torch.is_tensor(t)), default=0)
    return Launch(
        name, math.prod(int(n) for n in shape), {c: arguments[c] for c in constants if c in arguments}, elements
    )
