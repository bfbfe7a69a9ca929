"""One operator's slot in the dispatcher: the kernels tried in order, and the answer to a call.

A kernel runs below autograd: ATen's derivative formulas apply above it. Inside a kernel every
operator is ATen's own, so kernels neither run on each other nor recurse.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .domain import Domain
from .facts import FUNCTIONAL, Facts, leads_with_tensors, places_of_tensors, takes_any_number
from .originals import original_of, put
from .results import check_kind
from .shortest import GUARDED, INSIDE, Memory, below_autocast, shortest

Function = Callable[..., Any]
_MOST_REASONS = 16
"""Reasons for falling back that are counted separately; further ones share one count."""
_OTHER_REASONS = "other reasons"


class KernelWarning(RuntimeWarning):
    """A kernel failed and was removed, or is bypassed."""


LOCK = threading.RLock()
"""Held while kernels are installed or removed."""


@dataclass
class Count:
    """Counts of the calls to one kernel, by outcome."""

    server: Server
    served: int = 0
    aten: Counter[str] = field(default_factory=Counter)
    """How often the kernel was skipped, by reason."""

    def passed_by(self, reason: str) -> None:
        has_own_count = reason in self.aten or len(self.aten) < _MOST_REASONS
        self.aten[reason if has_own_count else _OTHER_REASONS] += 1


class Server:
    """A kernel installed at one operator."""

    def __init__(
        self,
        op: Facts,
        kernel: str,
        function: Function,
        domain: Domain | None,
        *,
        required: bool = True,
        own_form: bool,
    ) -> None:
        self.kernel = kernel
        self.count = Count(self)
        self._op = op
        self._function = function
        self._domain = domain
        self.memory: Memory | None = None
        if domain is not None and GUARDED:
            self.memory = Memory(domain, function, self._detached, any_number=takes_any_number(op))
        self._required = required
        self._redoable = not own_form or op.form == FUNCTIONAL
        """Whether ATen can still answer after the kernel raised. Adapters write last."""

    def outside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Say why a call is not for this kernel; empty if it is."""
        return "" if self._domain is None else self._domain.outside(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the kernel on a call, and check the types of its result."""
        function = self._detached if _requires_grad([*args, *kwargs.values()]) else self._function
        result = below_autocast(function)(*args, **kwargs)
        check_kind(self._op, result)
        return result

    def _detached(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, which is below autograd, so that it records no gradients.

        Tensors are detached if grad mode is on. The mode itself stays: some ATen operators keep
        more for a backward pass when it is on.
        """
        if not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        return self._function(*map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})

    def failed(self, error: Exception) -> bool:
        """Whether an exception is a failure of the kernel rather than its way of declining."""
        return self._required and not isinstance(error, NotImplementedError)

    @property
    def redoable(self) -> bool:
        return self._redoable


class Place:
    """An operator's dispatcher slot for one device. ``leave`` gives it back to ATen."""

    def __init__(self, op: Facts, key: str) -> None:
        self.op = op
        self._original = original_of(op, key)
        self._servers: tuple[Server, ...] = ()
        self._library = torch.library.Library("aten", "IMPL")
        check = functools.partial(check_kind, op)
        call, self._take = shortest(self._call, places_of_tensors(op), check, leading=leads_with_tensors(op))
        put(self._library, op, call, key)

    @property
    def servers(self) -> tuple[Server, ...]:
        """Return the installed kernels. The one enabled last is tried first."""
        return self._servers

    @servers.setter
    def servers(self, servers: tuple[Server, ...]) -> None:
        self._servers = servers
        match servers:
            case ():
                self._take(None, None, self._original)
            case (only,):
                self._take(only.memory, only.count, self._original)
            case (first, *_):
                self._take(first.memory, first.count, None)

    def leave(self) -> None:
        """Remove the override. The dispatcher is then as it was before."""
        self._library._destroy()  # noqa: SLF001  # torch has no public way to remove an implementation

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        raised: Exception | None = None,
        counted: Count | None = None,
    ) -> Any:
        """Answer a call on the slow path.

        If a kernel has been tried, ``raised`` is its exception and ``counted`` are its counts.
        """
        failures: list[tuple[Server, Exception]] = []
        try:
            return self._answer(args, kwargs, failures, raised, counted)
        finally:
            failures.clear()  # an error keeps its frames alive, and these keep the call's tensors alive

    def _answer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failures: list[tuple[Server, Exception]],
        raised: Exception | None,
        counted: Count | None,
    ) -> Any:
        tried = counted.server if counted is not None else None
        if tried is not None and raised is not None:
            failures += self._failed(tried, raised, args, kwargs)
        for server in self._servers if not INSIDE.now else ():
            if server is tried:
                continue
            if reason := server.outside(args, kwargs):
                server.count.passed_by(reason)
                continue
            try:
                result = _within(server, args, kwargs)
            except Exception as error:  # noqa: BLE001  # kernels raise anything
                failures += self._failed(server, error, args, kwargs)
                continue
            server.count.served += 1
            self._remove_failed(failures, f"{server.kernel} answers from now on")
            return result
        result = self._original(*args, **kwargs)
        self._remove_failed(failures, "ATen answers from now on")  # if ATen raises too, the kernel is not at fault
        return result

    def _failed(
        self, server: Server, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Server, Exception]]:
        """Count a kernel's exception; return it with the kernel if it is a failure.

        A kernel that declines has not written. If a failed kernel may have written, its exception
        is raised: the call is lost.
        """
        is_failure = server.failed(error)
        server.count.passed_by(f"{'raised' if is_failure else 'declined:'} {type(error).__name__}: {error}")
        if not is_failure:
            return []
        if server.redoable:
            return [(server, error)]
        if not self._aten_raises(args, kwargs):
            self._remove_failed([(server, error)], "the call is lost, because it may have written already")
        raise error

    def _aten_raises(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether ATen raises on copies of the arguments."""
        try:
            self._original(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})
        except Exception:  # noqa: BLE001  # any exception counts
            return True
        return False

    def _remove_failed(self, failures: list[tuple[Server, Exception]], then: str) -> None:
        for server, error in failures:
            with LOCK:
                self.servers = tuple(s for s in self.servers if s is not server)
            cause = f"{type(error).__name__}: {error}"
            text = f"kernel {server.kernel} failed in a call of {self.op.name} and was taken out ({cause}); {then}"
            warnings.warn(text, KernelWarning, stacklevel=3)


def _within(server: Server, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel with this thread marked as inside a kernel."""
    INSIDE.now = True
    try:
        return server.call(args, kwargs)
    finally:
        INSIDE.now = False


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value


def _requires_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_requires_grad, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_detached(v) for v in value] if isinstance(value, list | tuple) else value
