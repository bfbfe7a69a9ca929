"""Detect operators or implementations registered under ``aten`` since a kernel was loaded."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

_NAMESPACE = "aten::"
HARNESS = frozenset({
    "copy_", "clone", "empty", "empty_like", "empty_strided", "equal", "eq", "view", "as_strided", "set_", "_to_copy",
    "detach", "fill_", "zero_", "resize_", "slice", "select", "_local_scalar_dense", "contiguous", "reshape", "to",
    "resolve_conj", "resolve_neg", "flatten", "view_as_real", "bitwise_xor_", "logical_not_", "is_nonzero", "item",
    "alias", "_lazy_clone", "is_same_size", "lift_fresh",
})  # fmt: skip
"""Operators by which a worker makes inputs and returns results; checked after every batch."""


class RegistrationSnapshot:
    """Digests of everything registered under ``aten``, taken before any kernel is loaded."""

    def __init__(self) -> None:
        self._all_names = _all_names()
        self._known = {name: _described(name) for name in _aten_names(self._all_names)}
        self._harness_operators = [name for name in self._known if name[len(_NAMESPACE) :].partition(".")[0] in HARNESS]

    def changed(self, ignored: Iterable[str] = (), *, thorough: bool = True) -> list[str]:
        """Return the operators that are new, gone or registered again, except those with our traps.

        Describing all takes about 0.1 s. Unless ``thorough``, only new ones, gone ones and those
        that the harness needs are checked.
        """
        trapped = {f"{_NAMESPACE}{name.removesuffix('.default')}" for name in ignored}
        now = _all_names()
        names = self._known.keys() if now == self._all_names else set(_aten_names(now))
        looked_at = self._known if thorough else self._harness_operators
        changes = [n for n in looked_at if n in names and n not in trapped and _described(n) != self._known[n]]
        return sorted([*changes, *(names ^ self._known.keys())])


registration_snapshot = functools.cache(RegistrationSnapshot)
"""Snapshot of the registrations; the server takes it before any kernel loads."""


def _all_names() -> list[str]:
    # torch has no public list of operators
    names: list[str] = torch._C._dispatch_get_all_op_names()  # noqa: SLF001
    return names


def _aten_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_NAMESPACE)]


def _described(name: str) -> int:
    return hash(torch._C._dispatch_dump(name))  # noqa: SLF001  # nor a public description of one
