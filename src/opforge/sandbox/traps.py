"""Notice which of ATen's operators a kernel calls: the ones that it may not call are trapped in the dispatcher itself.

A trap stands where ATen's kernel stood, so a call is seen on every thread, from native code, and through any composite
operator that ends in it. It notes the call and passes it on to ATen.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.ops import Operator, table
from opforge.runtime.facts import qualified
from opforge.runtime.originals import original_of, put, registrations

Function = Callable[..., Any]


class Traps:
    """The trapped operators of this process, and the calls that were noted."""

    def __init__(self, device: str) -> None:
        self._keys = ["CPU"] if device == "cpu" else ["CPU", "CUDA"]
        self._library = torch.library.Library("aten", "IMPL")
        self._set: dict[str, str] = {}
        """Each trapped operator's registrations, as they were when the trap was set."""
        self._calls: set[tuple[str, bool]] = set()
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._children = mmap.mmap(-1, mmap.PAGESIZE)
        """What forked children noted: memory that they share with this process."""
        self._inside = False

    def set(self, names: list[str]) -> None:
        """Trap operators; those that have no kernel on this device cannot be called and need no trap."""
        for name in names:
            if name not in self._set and (facts := table().get(name)) is not None:
                for key in self._keys:
                    self._set_one(facts, key)
                self._set[name] = registrations(facts)

    def _set_one(self, facts: Operator, key: str) -> None:
        try:
            original = original_of(facts, key)
        except RuntimeError:
            return
        name = qualified(facts.name)

        def trap(*args: Any, **kwargs: Any) -> Any:
            self._note(name, [*args, *kwargs.values()])
            return original(*args, **kwargs)

        put(self._library, facts, trap, key)

    def _note(self, name: str, values: list[Any]) -> None:
        if self._inside or threading.get_ident() != self._main:
            floats = any(t.is_floating_point() or t.is_complex() for t in values if isinstance(t, torch.Tensor))
            self._calls.add((name, floats))
            if os.getpid() != self._pid:
                self._tell_parent(name, floats)

    def _tell_parent(self, name: str, floats: bool) -> None:
        entry = f"{name}:{int(floats)}\n".encode()
        end = self._children.find(b"\0")
        if entry not in self._children[:end] and end + len(entry) < len(self._children):
            self._children[end : end + len(entry)] = entry

    def listing(self) -> Listing:
        """Return a mode that counts what the kernel, and not the harness, calls."""
        return Listing(lambda: self._inside)

    def watched(self, kernel: Function) -> Function:
        """Return a kernel's function such that calls from within it are told from the harness's own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return kernel(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def sprung(self, *, floats: bool) -> list[str]:
        """Return and forget the calls that were noted here and in forked children.

        Where a case has floats, those on integers alone are a kernel's own counting.
        """
        for entry in self._children[: self._children.find(b"\0")].decode().split():
            name, _, number = entry.partition(":")
            self._calls.add((name, number == "1"))
        found = sorted({name for name, on_floats in self._calls if on_floats or not floats})
        self._calls.clear()
        self._children[:] = bytes(len(self._children))
        return found

    def removed(self) -> list[str]:
        """Return the trapped operators that something has registered anew."""
        return [name.removesuffix(".default") for name, was in self._set.items() if _registered(name) != was]


def _registered(name: str) -> str:
    facts = table().get(name)
    return "" if facts is None else registrations(facts)


class Listing(TorchDispatchMode):
    """Counts the ATen calls of this thread, while something holds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler when the first mode is made, which takes seconds

    def __init__(self, counting: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._counting = counting
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if self._counting():
            self.calls[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))
