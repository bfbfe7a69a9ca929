"""Namespaces that two libraries claim, and operators that two define: torch ends the process on them, so they are found before anything is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.kernels.native.looking import Look, look
from opforge.kernels.native.sources import Registration


@dataclass(frozen=True, slots=True)
class Clash:
    """Two files of which only one can be loaded."""

    namespace: str
    first: str
    second: str
    operator: str = ""
    """The operator that both define; empty where both claim the namespace."""

    def __str__(self) -> str:
        if self.operator:
            what = f"operator {self.namespace}::{self.operator} is defined twice: in {self.first} and in {self.second}"
            return f"{what}; give one of them another name, or another namespace"
        return (
            f"namespace {self.namespace!r} is claimed twice: by {self.first} and by {self.second}; loading both ends the process. "
            f"Give one of them another name, or register there with TORCH_LIBRARY_FRAGMENT({self.namespace}, m), "
            "which adds to a namespace (STABLE_TORCH_LIBRARY_FRAGMENT with the stable ABI)"
        )


class ClashError(OpforgeError):
    """Libraries that cannot be loaded together."""

    exit_code = 1

    def __init__(self, clashes: Sequence[Clash]) -> None:
        super().__init__("\n".join(map(str, clashes)))
        self.clashes = tuple(clashes)


def clashes_of_sources(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    """Return the clashes that can be read from the sources of some units, within a unit too."""
    return list(_claimed_twice(units)) + list(_defined_twice(units))


def _claimed_twice(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    claims: dict[str, list[Registration]] = {}
    for block in itertools.chain.from_iterable(units.values()):
        if block.whole:
            claims.setdefault(block.namespace, []).append(block)
    return [Clash(name, _place(a), _place(b)) for name, (a, *rest) in claims.items() for b in rest]


def _defined_twice(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    seen: dict[tuple[str, str], Registration] = {}
    found = []
    for block in itertools.chain.from_iterable(units.values()):
        for operator in block.operators:
            first = seen.setdefault((block.namespace, operator), block)
            if first is not block and not (first.whole and block.whole):
                found.append(Clash(block.namespace, _place(first), _place(block), operator))
    return found


def _place(block: Registration) -> str:
    return f"{block.file}:{block.line}"


def check(libraries: Sequence[Path], loaded: Mapping[str, str] | None = None) -> list[Look]:
    """Return what each library adds; raise where one cannot be loaded, or two of them not together.

    ``loaded`` are operators that are there already, with where they come from: those of the process that will load the libraries.
    """
    looks = look([[path] for path in libraries])
    clashes = list(_with_loaded(looks, loaded or {}))
    pairs = [(a, b) for a, b in itertools.combinations(looks, 2) if set(a.namespaces) & set(b.namespaces)]
    together = look([[a.paths[0], b.paths[0]] for a, b in pairs]) if pairs else []
    for (a, b), both in zip(pairs, together, strict=True):
        if both.error:
            clashes.append(_clash(a, b))
    if clashes:
        raise ClashError(clashes)
    return looks


def _clash(a: Look, b: Look) -> Clash:
    shared = sorted(set(a.operators) & set(b.operators))
    namespace = min(set(a.namespaces) & set(b.namespaces))
    name = shared[0].partition("::")[2] if shared and not _whole(a, b, namespace) else ""
    return Clash(namespace, str(a.paths[0]), str(b.paths[0]), name)


def _whole(a: Look, b: Look, namespace: str) -> bool:
    """Whether two libraries clash by the namespace itself and not by an operator."""
    del namespace
    return not set(a.operators) & set(b.operators)


def _with_loaded(looks: Sequence[Look], loaded: Mapping[str, str]) -> list[Clash]:
    found = []
    for one in looks:
        for name in one.operators:
            if name in loaded:
                namespace, _, operator = name.partition("::")
                found.append(Clash(namespace, loaded[name], str(one.paths[0]), operator))
                break
    return found
