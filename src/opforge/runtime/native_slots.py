"""An operator's native slot: its calls reach Python once for each geometry, and to run kernels in Python.

The slot in C++ asks ``decide`` about a geometry that it does not know. The answer is the number of
an outcome, which C++ remembers with the geometry and carries out from then on. So Python's check is
the only one: C++ recognises what Python has decided, by everything that the decision depends on.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .aten_kernels import NUMBER_TYPES
from .dispatch import InstalledKernel, OperatorSlot
from .fast_path import below_autocast
from .learning import LEARNER, learning_here
from .native.binding import PASS, RUN, SERVE, NativeLibrary
from .operator_schema import FUNCTIONAL, OperatorSchema, dispatcher_name
from .results import check_result_types
from .saved_plans import SavedPlans
from .value_ranges import NumberLimits, number_limits

_OUTCOME_BITS = 8
_ANSWER_IN_PYTHON = -1
_NUMBER_ARGUMENTS = frozenset({"number", "float", "Optional[number]", "Optional[float]"})
_KEPT_GENERATIONS = 4
"""Generations of outcomes that are kept, for calls that were decided before kernels were changed."""
_generation_numbers = itertools.count(1)
_lock = threading.RLock()
"""Held while outcomes are added, counted or replaced.

Finalisers and signal handlers may call operators meanwhile, so a thread may take it twice.
"""
os.register_at_fork(  # a forked child has no half of a change that another thread was making
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of calls of some geometries, and what is counted for each."""

    action: int
    passed: tuple[tuple[InstalledKernel, str], ...]
    """Kernels that the calls are not for, with the reasons."""
    kernel: InstalledKernel | None = None
    needs_grad: bool = False
    """Whether a tensor of the calls requires gradients."""

    def count(self, times: int) -> None:
        for kernel, reason in self.passed if times else ():
            kernel.counts.count_fallback(reason, times)
        if self.kernel is not None:
            self.kernel.counts.served += times


@dataclass(slots=True, eq=False)
class _Generation:
    """The outcomes that are possible with some kernels."""

    number: int
    kernels: tuple[InstalledKernel, ...]
    numbers: dict[Outcome, int] = field(default_factory=dict)
    _collected: Counter[int] = field(default_factory=Counter)
    """Counts that have been added to the kernels' counts."""

    def add_counts(self, counts: Sequence[int]) -> None:
        """Add to the kernels' counts what has come since the last time."""
        for outcome, number in list(self.numbers.items()):
            if number < len(counts):
                before, self._collected[number] = self._collected[number], counts[number]
                outcome.count(counts[number] - before)


class _NativeMark:
    """Whether this thread is inside a kernel. C++ looks at it before it calls Python."""

    def __init__(self, library: NativeLibrary) -> None:
        self._set = library.set_inside

    @property
    def now(self) -> bool:
        return False

    @now.setter
    def now(self, value: bool) -> None:
        self._set(int(value))


class NativeSlot(OperatorSlot):
    """A slot in C++, with kernels in Python or C++."""

    def __init__(self, op: OperatorSchema, key: str, library: NativeLibrary) -> None:
        super().__init__(op, key)
        self.library = library
        self.inside = _NativeMark(library)
        self._generation = _Generation(0, ())
        self._native = library.slot(f"aten::{dispatcher_name(op.name)}", key)
        self._python = _python_part(self, op, key, library)
        self._native.install(self._python.name)

    def _use(self, servers: tuple[InstalledKernel, ...]) -> None:
        with _lock:
            old, new = self._generation, _Generation(next(_generation_numbers), servers)
            self._generation = new
            if self._python.slot is self:  # no newer slot of this operator has taken over
                old.add_counts(self._native.set_rules(new.number if servers else -1, self._limits(servers)))
                self._python.begin(new.number)

    def load_plans(self, kernel: InstalledKernel, saved: SavedPlans) -> None:
        """Prepare a kernel that is about to be installed for launch plans, and load those that were saved."""
        if kernel.plans.learn == "never":
            return
        kernel.plans.store = self.library.new_plan_store()
        if saved.problem:
            kernel.plans.not_loaded[saved.problem] += 1
        saved.load(self.op, kernel.plans, self.library)

    def _limits(self, servers: tuple[InstalledKernel, ...]) -> dict[int, NumberLimits]:
        """Return what ``decide`` depends on of each argument that is a number, by position.

        A number that is new in every call, such as a learning rate, is then not asked about in every call.
        """
        numbers = [(i, a) for i, a in enumerate(self.op.arguments) if a.type in _NUMBER_ARGUMENTS]
        return {
            i: number_limits([ranges for kernel in servers for ranges in kernel.number_ranges(a)], a.default)
            for i, a in numbers
        }

    def restore(self) -> None:
        self._native.remove()

    def switch_off(self) -> None:
        """Let all calls go to ATen, because Python's part is about to end."""
        self._use(())

    def collect_counts(self) -> None:
        with _lock:
            self._generation.add_counts(self._native.counts())

    def decide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the code of the outcome for calls with this geometry: generation and number."""
        generation = self._generation
        passed: list[tuple[InstalledKernel, str]] = []
        for kernel in generation.kernels:
            if reason := kernel.why_not(args, kwargs):
                passed.append((kernel, reason))
            elif _can_be_passed(self.op, kernel, args, kwargs):
                return self._code(generation, Outcome(SERVE, tuple(passed), kernel))
            else:
                return self._code(generation, Outcome(RUN, tuple(passed), kernel, kernel.needs_grad(args, kwargs)))
        return self._code(generation, Outcome(PASS, tuple(passed)))

    def _code(self, generation: _Generation, outcome: Outcome) -> int:
        with _lock:
            number = generation.numbers.get(outcome)
            if number is None:
                operator = outcome.kernel.proven_operator if outcome.kernel and outcome.action == SERVE else None
                name = operator.name() if operator else ""
                store = outcome.kernel.plans.store if outcome.kernel else 0
                added = self._native.add_outcome(generation.number, outcome.action, name, store)
                if added is None:  # kernels were changed meanwhile, or there are too many outcomes
                    return _ANSWER_IN_PYTHON
                self._python.outcomes[generation.number << _OUTCOME_BITS | added] = outcome
                number = generation.numbers.setdefault(outcome, added)
            return generation.number << _OUTCOME_BITS | number

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], counted: Outcome | None) -> Any:
        """Answer a call on the slow path. ``counted`` is its outcome if C++ has tried a kernel, which failed."""
        if counted is not None:
            counted.count(-1)
        return self._call(args, kwargs)

    def failed(self, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Outcome, error: Exception) -> Any:
        """Answer a call on the slow path after a kernel in Python has raised."""
        self.inside.now = False
        return self._call(args, kwargs, error, outcome.kernel.counts if outcome.kernel else None)


class _PythonPart:
    """The operators by which C++ calls Python for one slot. They stay, as the slot in C++ does."""

    def __init__(self, slot: NativeSlot, op: OperatorSchema, key: str, library: NativeLibrary) -> None:
        self.slot = slot
        self.outcomes: dict[int, Outcome] = {}
        """Outcomes of the last generations, by code."""
        self._generations: list[int] = []
        self._check = functools.partial(check_result_types, op)
        self._returns_tensor = [r.type for r in op.returns] == ["Tensor"]
        self.name = re.sub(r"\W", "_", f"{op.name}_{key}_{len(_python_parts)}")
        arguments, _, returns = str(_overload(op.name)._schema).partition("(")[2].rpartition(") -> ")  # noqa: SLF001
        separator = ", " if "*, " in arguments else ", *, " if arguments else "*, "
        with_code = f"{arguments}{separator}int opforge_code"
        for name, schema, function in (
            ("decide", f"({arguments}) -> int", self._decide),
            ("answer", f"({with_code}) -> {returns}", self._answer),
            ("run", f"({with_code}) -> {returns}", self._run),
        ):
            library.define(f"{name}_{self.name}", schema, function, key)
        weakref.finalize(library, self._end)  # at exit, before torch removes these operators

    def _end(self) -> None:
        self.slot.switch_off()

    def begin(self, generation: int) -> None:
        """Begin a generation of outcomes; forget old ones."""
        self._generations = [*self._generations[1 - _KEPT_GENERATIONS :], generation]
        oldest = self._generations[0]
        self.outcomes = {code: o for code, o in self.outcomes.items() if code >> _OUTCOME_BITS >= oldest}

    def _decide(self, *args: Any, **kwargs: Any) -> int:
        return self.slot.decide(args, kwargs)

    def _answer(self, *args: Any, opforge_code: int, **kwargs: Any) -> Any:
        return self.slot.answer(args, kwargs, self.outcomes.get(opforge_code))

    def _run(self, *args: Any, opforge_code: int, **kwargs: Any) -> Any:
        """Run a kernel on a call that C++ has decided, and count the call."""
        outcome = self.outcomes.get(opforge_code)
        if outcome is None or outcome.kernel is None:  # kernels have been changed several times since
            self.slot.inside.now = False
            return self.slot.answer(args, kwargs, None)
        function = below_autocast(outcome.kernel.function(needs_grad=outcome.needs_grad))
        if (learning := learning_here()) is not None:  # not a call of the user's: it is not counted
            return learning.answer(outcome.kernel.plans, function, self.slot.aten_kernel, args, kwargs)
        LEARNER.note(self.slot, outcome.kernel.plans, args, kwargs)
        try:
            result = function(*args, **kwargs)
            if result.__class__ is not torch.Tensor or not self._returns_tensor:
                self._check(result)
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            return self.slot.failed(args, kwargs, outcome, error)
        outcome.count(1)
        return result


_python_parts: dict[tuple[str, str], _PythonPart] = {}


def _python_part(slot: NativeSlot, op: OperatorSchema, key: str, library: NativeLibrary) -> _PythonPart:
    part = _python_parts.get((op.name, key))
    if part is None:
        part = _python_parts[op.name, key] = _PythonPart(slot, op, key, library)
    part.slot = slot
    return part


def _can_be_passed(
    op: OperatorSchema, kernel: InstalledKernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a kernel's C++ operator gets the same from C++ as it got from Python when it was judged.

    The signature must be the operator's without what is written, defaults included: Python leaves
    out arguments that equal them. Python turns a tensor that stands for a number into that number,
    and C++ does not detach the tensors of a list.
    """
    operator = kernel.proven_operator
    if operator is None or _signature(operator) != _signature(_overload(op.name), functional=op.kind == FUNCTIONAL):
        return False
    targets = [argument.type for argument in op.arguments if argument.writes]
    if targets and targets != [result.type for result in op.returns]:  # C++ copies to single tensors
        return False
    for i, argument in enumerate(op.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if "Tensor" not in argument.type:
            continue
        if argument.type == "Tensor?[]" or isinstance(value, NUMBER_TYPES):
            return False
        if isinstance(value, list | tuple) and any(item.requires_grad for item in value):
            return False
    return True


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload)


def _signature(operator: Any, *, functional: bool = True) -> tuple[Any, ...]:
    """Return the types of an operator; if it is not functional, those of the functional one that it would be."""
    schema = operator._schema  # noqa: SLF001  # torch has no public name for it
    arguments = [
        (str(a.type), a.kwarg_only and a.name, a.has_default_value(), repr(a.default_value),
         not functional or a.alias_info is None)
        for a in schema.arguments
        if functional or not a.is_out
    ]  # fmt: skip
    return tuple(arguments), tuple((str(r.type), not functional or r.alias_info is None) for r in schema.returns)
