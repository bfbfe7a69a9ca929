"""One operator's slot in the dispatcher: the kernels tried in order, and the answer to a call.

A kernel runs below autograd: ATen's derivative formulas apply above it. Inside a kernel every
operator is ATen's own, so kernels neither run on each other nor recurse.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .aten_kernels import aten_kernel, override
from .fast_path import HAS_GUARDS, INSIDE_KERNEL, DecisionCache, below_autocast, make_fast_path
from .learning import KernelPlans
from .operator_schema import (
    FUNCTIONAL,
    Argument,
    OperatorSchema,
    takes_any_number,
    tensor_positions,
    tensors_come_first,
)  # fmt: skip
from .proven_calls import ProvenCalls
from .results import check_result_types
from .trees import map_instances
from .value_ranges import ValueRanges

Function = Callable[..., Any]
_MAX_REASONS = 16
"""Reasons for falling back that are counted separately; further ones share one count."""
_OTHER_REASONS = "other reasons"


class KernelWarning(RuntimeWarning):
    """A kernel failed and was removed, or is bypassed."""


INSTALL_LOCK = threading.RLock()
"""Held while kernels are installed or removed. A forked child lacks the thread that may hold it."""
os.register_at_fork(after_in_child=INSTALL_LOCK._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


@dataclass
class CallCounts:
    """Counts of the calls to one kernel, by outcome."""

    kernel: InstalledKernel
    served: int = 0
    aten: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often the kernel was skipped, by reason.

    Not a Counter: its first count of a reason calls a function in Python, where threads may switch.
    """

    def count_fallback(self, reason: str, times: int = 1) -> None:
        has_own_count = reason in self.aten or len(self.aten) < _MAX_REASONS
        self.aten[reason if has_own_count else _OTHER_REASONS] += times


class InstalledKernel:
    """A kernel installed at one operator."""

    def __init__(
        self,
        op: OperatorSchema,
        name: str,
        function: Function,
        proven_calls: ProvenCalls | None,
        *,
        required: bool = True,
        unadapted: bool,
        functional: Function | None = None,
        learn: str = "never",
    ) -> None:
        """Install a function. ``functional`` is the functional kernel that it calls, or is itself, if there is one."""
        self.name = name
        self.plans = KernelPlans(learn)
        self.counts = CallCounts(self)
        self._op = op
        self._function = function
        self._functional = functional
        self._proven_calls = proven_calls
        self.decisions: DecisionCache | None = None
        if proven_calls is not None and HAS_GUARDS:
            self.decisions = DecisionCache(proven_calls, function, self._detached, any_number=takes_any_number(op))
        self._required = required
        self._aten_can_retry = not unadapted or op.kind == FUNCTIONAL
        """Whether ATen can still answer after the kernel raised. Adapters write last."""

    def why_not(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Say why a call is not for this kernel; empty if it is."""
        return "" if self._proven_calls is None else self._proven_calls.why_not(args, kwargs)

    def number_ranges(self, argument: Argument) -> list[ValueRanges]:
        """Return what ``why_not`` knows of an argument that is a number."""
        return [] if self._proven_calls is None else self._proven_calls.number_ranges(argument)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the kernel on a call, and check the types of its result."""
        function = self.function(needs_grad=self.needs_grad(args, kwargs))
        result = below_autocast(function)(*args, **kwargs)
        check_result_types(self._op, result)
        return result

    def function(self, *, needs_grad: bool) -> Function:
        """Return the kernel's function, for calls in which a tensor requires gradients or none does."""
        return self._detached if needs_grad else self._function

    @staticmethod
    def needs_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a tensor of a call requires gradients."""
        return _requires_grad([*args, *kwargs.values()])

    @property
    def proven_operator(self) -> Any:
        """Return the functional C++ operator that answers proven calls; None if other code is needed too.

        At an in-place or out variant, its results are to be copied to the tensors that are written.
        """
        is_operator = isinstance(self._functional, torch._ops.OpOverload)  # noqa: SLF001  # torch has no public name
        return self._functional if is_operator and self._proven_calls is not None else None

    def _detached(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, which is below autograd, so that it records no gradients.

        Tensors are detached if grad mode is on. The mode itself stays: some ATen operators keep
        more for a backward pass when it is on.
        """
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        args, kwargs = map_instances((args, kwargs), torch.Tensor, torch.Tensor.detach)
        return self._function(*args, **kwargs)

    def is_failure(self, error: Exception) -> bool:
        """Whether an exception is a failure of the kernel rather than its way of declining."""
        return self._required and not isinstance(error, NotImplementedError)

    @property
    def aten_can_retry(self) -> bool:
        return self._aten_can_retry


class InsideMark(Protocol):
    """Whether this thread is inside a kernel."""

    now: bool


class OperatorSlot(ABC):
    """An operator's dispatcher slot for one device. ``restore`` gives it back to ATen."""

    inside: InsideMark

    def __init__(self, op: OperatorSchema, key: str) -> None:
        self.op = op
        self.aten_kernel = aten_kernel(op, key)
        self._kernels: tuple[InstalledKernel, ...] = ()

    @property
    def kernels(self) -> tuple[InstalledKernel, ...]:
        """Return the installed kernels. The one enabled last is tried first."""
        return self._kernels

    @kernels.setter
    def kernels(self, servers: tuple[InstalledKernel, ...]) -> None:
        self._kernels = servers
        self._use(servers)

    @abstractmethod
    def _use(self, servers: tuple[InstalledKernel, ...]) -> None:
        """Let calls go to these kernels from now on."""

    @abstractmethod
    def restore(self) -> None:
        """Remove the override. The dispatcher is then as it was before."""

    def collect_counts(self) -> None:  # noqa: B027  # for slots that count elsewhere
        """Bring the kernels' counts up to date."""

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        raised: Exception | None = None,
        counted: CallCounts | None = None,
    ) -> Any:
        """Answer a call on the slow path.

        If a kernel has been tried, ``raised`` is its exception and ``counted`` are its counts.
        """
        failures: list[tuple[InstalledKernel, Exception]] = []
        try:
            return self._answer(args, kwargs, failures, raised, counted)
        finally:
            failures.clear()  # an error keeps its frames alive, and these keep the call's tensors alive

    def _answer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failures: list[tuple[InstalledKernel, Exception]],
        raised: Exception | None,
        counted: CallCounts | None,
    ) -> Any:
        tried = counted.kernel if counted is not None else None
        if tried is not None and raised is not None:
            failures += self._failed(tried, raised, args, kwargs)
        for server in self._kernels if not self.inside.now else ():
            if server is tried:
                continue
            if reason := server.why_not(args, kwargs):
                server.counts.count_fallback(reason)
                continue
            try:
                result = self._run_inside(server, args, kwargs)
            except Exception as error:  # noqa: BLE001  # kernels raise anything
                failures += self._failed(server, error, args, kwargs)
                continue
            server.counts.served += 1
            self._remove_failed(failures, f"{server.name} handles calls from now on")
            return result
        result = self.aten_kernel(*args, **kwargs)
        # If ATen raises too, the kernel is not at fault.
        self._remove_failed(failures, "ATen handles calls from now on")
        return result

    def _failed(
        self, server: InstalledKernel, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[InstalledKernel, Exception]]:
        """Count a kernel's exception; return it with the kernel if it is a failure.

        A kernel that declines has not written. If a failed kernel may have written, its exception
        is raised: the call is lost.
        """
        is_failure = server.is_failure(error)
        server.counts.count_fallback(f"{'raised' if is_failure else 'declined:'} {type(error).__name__}: {error}")
        if not is_failure:
            return []
        if server.aten_can_retry:
            return [(server, error)]
        if not self._aten_raises(args, kwargs):
            self._remove_failed([(server, error)], "the call fails, because the kernel may have written already")
        raise error

    def _aten_raises(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether ATen raises on copies of the arguments."""
        try:
            args, kwargs = map_instances((args, kwargs), torch.Tensor, lambda t: t.detach().clone())
            self.aten_kernel(*args, **kwargs)
        except Exception:  # noqa: BLE001  # any exception counts
            return True
        return False

    def _remove_failed(self, failures: list[tuple[InstalledKernel, Exception]], then: str) -> None:
        for server, error in failures:
            with INSTALL_LOCK:
                self.kernels = tuple(s for s in self.kernels if s is not server)
            cause = f"{type(error).__name__}: {error}"
            text = f"kernel {server.name} failed in a call of {self.op.name} and was removed ({cause}); {then}"
            warnings.warn(text, KernelWarning, stacklevel=3)

    def _run_inside(self, server: InstalledKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel with this thread marked as inside a kernel."""
        self.inside.now = True
        try:
            return server.call(args, kwargs)
        finally:
            self.inside.now = False


class PythonSlot(OperatorSlot):
    """A slot whose calls go through Python, also those that ATen answers."""

    inside = INSIDE_KERNEL

    def __init__(self, op: OperatorSchema, key: str) -> None:
        super().__init__(op, key)
        self._library = torch.library.Library("aten", "IMPL")
        check = functools.partial(check_result_types, op)
        call, self._set_first = make_fast_path(self._call, tensor_positions(op), check, leading=tensors_come_first(op))
        override(self._library, op, call, key)

    def _use(self, servers: tuple[InstalledKernel, ...]) -> None:
        match servers:
            case ():
                self._set_first(None, None, self.aten_kernel)
            case (only,):
                self._set_first(only.decisions, only.counts, self.aten_kernel)
            case (first, *_):
                self._set_first(first.decisions, first.counts, None)

    def restore(self) -> None:
        self._library._destroy()  # noqa: SLF001  # torch has no public way to remove an implementation


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_requires_grad, value))
    return isinstance(value, torch.Tensor) and value.requires_grad
