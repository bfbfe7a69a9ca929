"""Install and remove kernels in place of ATen's, fall back to ATen, and count calls.

A kernel runs below autograd: ATen's derivative formulas stay in use, and its tensors do not
require gradients. Inside a kernel every operator is ATen's own, so kernels neither call each other
nor recurse.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from opforge.errors import OpforgeError
from opforge.ops import Operator, table
from opforge.runtime.aten_kernels import aten_kernel, dispatch_key, override
from opforge.runtime.results import check_result_types

Function = Callable[..., Any]
_MAX_REASONS = 8
"""Limit of distinct fallback reasons per count; further reasons are counted together."""
_OTHER_REASONS = "other reasons"


class RefusedError(OpforgeError):
    """No kernel can be installed for an operator; the message gives the reason."""


class Observer(Protocol):
    """Callbacks before and after each kernel call."""

    def before(self, kernel: str, op: str) -> None: ...

    def after(self, kernel: str, op: str) -> None: ...


@dataclass
class CallCounts:
    """Outcomes of the calls of one operator with one kernel."""

    answered: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Number of calls answered by ATen instead, by reason."""
    raised: str = ""
    """Last error of the kernel that was passed on to the caller, not counting declined calls."""

    def count_fallback(self, reason: str) -> None:
        known = reason in self.fallbacks or len(self.fallbacks) < _MAX_REASONS
        self.fallbacks[reason if known else _OTHER_REASONS] += 1


class _InsideKernel(threading.local):
    """Whether this thread is inside a kernel."""

    now = False


class Installation:
    """The kernels installed in place of ATen's for one device, until ``remove`` is called."""

    def __init__(self, device: str = "cpu") -> None:
        self._key = dispatch_key(device)
        self._library = torch.library.Library("aten", "IMPL")
        self._inside = _InsideKernel()
        self._kernels: dict[str, str] = {}
        self.counts: dict[tuple[str, str], CallCounts] = {}
        """Counts by kernel and operator."""
        self.observer: Observer | None = None
        self._paused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @contextmanager
    def active(self, *, active: bool = True) -> Iterator[None]:
        """Activate kernels within the block; ``active=False`` keeps them installed but unused."""
        before, self._paused = self._paused, not active
        try:
            yield
        finally:
            self._paused = before

    @property
    def ops(self) -> list[str]:
        """Return the operators with an installed kernel."""
        return list(self._kernels)

    def install(self, op: str, function: Function, *, kernel: str, required: bool = True) -> None:
        """Install a function with an operator's signature in place of ATen's.

        The function declines a call by raising NotImplementedError, or any error unless it is
        ``required``. ATen then answers. Raises RefusedError if ATen's function cannot be replaced.
        """
        facts = table().resolve(op)
        count = CallCounts()
        override(
            self._library,
            facts,
            self._call(facts, function, self._aten_kernel(facts), kernel, required, count),
            self._key,
        )
        self._kernels[facts.name] = kernel
        self.counts[kernel, facts.name] = count

    def install_aten(self, op: str, *, kernel: str) -> None:
        """Install ATen's own function, so its calls are counted and observed like a kernel's."""
        self.install(op, self.aten_kernel(op), kernel=kernel)

    def aten_kernel(self, op: str) -> Function:
        """Return ATen's own function; raises RefusedError if it cannot be replaced."""
        return self._aten_kernel(table().resolve(op))

    def remove(self) -> None:
        """Remove all kernels and restore the dispatcher to its earlier state."""
        if self._kernels:
            self._library._destroy()  # noqa: SLF001  # torch has no public way to remove an implementation
            self._library = torch.library.Library("aten", "IMPL")
            self._kernels = {}

    def clear_counts(self) -> None:
        for count in self.counts.values():
            count.answered, count.raised = 0, ""
            count.fallbacks.clear()

    def _aten_kernel(self, op: Operator) -> Function:
        if op.composite:
            raise RefusedError(
                f"{op.name} is made of other operators (CompositeImplicitAutograd): overriding it would cut off "
                "gradients. Write a kernel for one of these operators"
            )
        if op.name in self._kernels:
            raise RefusedError(f"{op.name} is already overridden by {self._kernels[op.name]}")
        try:
            return aten_kernel(op, self._key)
        except RuntimeError:
            raise RefusedError(f"{op.name} has no ATen kernel for {self._key} to override") from None

    def _call(
        self, op: Operator, function: Function, original: Function, kernel: str, required: bool, count: CallCounts
    ) -> Function:
        inside, name = self._inside, op.name

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside.now or self._paused:
                return original(*args, **kwargs)
            inside.now = True
            observer = self.observer
            try:
                if observer is not None:
                    observer.before(kernel, name)
                result = function(*args, **kwargs)
                check_result_types(op, result)
                count.answered += 1
            except Exception as error:  # a kernel may raise anything; if it must not, the error is passed on
                if required and not isinstance(error, NotImplementedError):
                    count.raised = f"{type(error).__name__}: {error}"
                    raise
                count.count_fallback(f"{type(error).__name__}: {error}")
                return original(*args, **kwargs)
            finally:
                inside.now = False
                if observer is not None:
                    observer.after(kernel, name)
            return result

        return call
