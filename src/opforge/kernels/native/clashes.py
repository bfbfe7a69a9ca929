"""Clashes: namespaces that two libraries claim, and operators that two define.

Torch ends the process on them, so they are found before anything is loaded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opforge.errors import OpforgeError
from opforge.kernels.native.inspect import LibraryInspection, inspect_libraries
from opforge.kernels.native.sources import Registration


@dataclass(frozen=True, slots=True)
class Clash:
    """Two files that cannot be loaded together."""

    namespace: str
    first: str
    second: str
    operator: str = ""
    """The operator that both define; empty if both claim the namespace."""

    def __str__(self) -> str:
        if self.operator:
            problem = (
                f"operator {self.namespace}::{self.operator} is defined twice: in {self.first} and in {self.second}"
            )
            return f"{problem}; give one of them another name, or another namespace"
        return (
            f"namespace {self.namespace!r} is claimed twice: by {self.first} and by {self.second}; loading both ends "
            "the process. "
            f"Give one of them another name, or register there with TORCH_LIBRARY_FRAGMENT({self.namespace}, m), "
            "which adds to a namespace (STABLE_TORCH_LIBRARY_FRAGMENT with the stable ABI)"
        )


@dataclass(frozen=True, slots=True)
class ProcessRegistrations:
    """Registrations in some namespaces of a process, as far as torch knows.

    For each namespace, its claimant; for each operator, where it was registered.
    """

    claims: Mapping[str, str]
    operators: Mapping[str, str]

    @classmethod
    def of_this_process(cls, namespaces: Collection[str]) -> ProcessRegistrations:
        """Return the registrations of this process."""
        import torch

        names = torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # torch has no public list of operators
        selected = [name for name in names if name.partition("::")[0] in namespaces]
        dumps = {name: torch._C._dispatch_dump(name) for name in selected}  # noqa: SLF001
        operators = {name: _first_match(r"^debug: registered at (.+)$", dump) for name, dump in dumps.items()}
        return cls({name: owner for name in sorted(namespaces) if (owner := _claimant(name)) is not None}, operators)


def _claimant(namespace: str) -> str | None:
    """Return the claimant of a namespace in this process; None if unclaimed.

    Claims it for a moment: from Python, a second claim only raises an error.
    """
    import torch

    try:
        torch.library.Library(namespace, "DEF")._destroy()  # noqa: SLF001  # torch has no public way to release it
    except RuntimeError as error:
        return _first_match(r"Previous registration of TORCH_LIBRARY was registered at (.+?)(?:;|$)", str(error))
    except ValueError:  # a name reserved by torch
        return "torch"
    return None


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else "this process"


class ClashError(OpforgeError):
    """Libraries that cannot be loaded together."""

    exit_code = 1

    def __init__(self, clashes: Sequence[Clash]) -> None:
        super().__init__("\n".join(map(str, clashes)))
        self.clashes = tuple(clashes)


def clashes_of_sources(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    """Return the clashes visible in the sources of some units, including those within a unit.

    Blocks whose namespace is an unknown macro are left to the trial load of the built libraries.
    """
    known = {name: [block for block in blocks if block.namespace_known] for name, blocks in units.items()}
    return list(_claimed_twice(known)) + list(_defined_twice(known))


def _claimed_twice(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    claims: dict[str, list[Registration]] = {}
    for block in itertools.chain.from_iterable(units.values()):
        if block.claims_namespace:
            claims.setdefault(block.namespace, []).append(block)
    return [Clash(name, _file_and_line(a), _file_and_line(b)) for name, (a, *rest) in claims.items() for b in rest]


def _defined_twice(units: Mapping[str, Sequence[Registration]]) -> list[Clash]:
    seen: dict[tuple[str, str], Registration] = {}
    clashes = []
    for block in itertools.chain.from_iterable(units.values()):
        for operator in block.operators:
            first = seen.setdefault((block.namespace, operator), block)
            if first is not block and not (first.claims_namespace and block.claims_namespace):
                clashes.append(Clash(block.namespace, _file_and_line(first), _file_and_line(block), operator))
    return clashes


def _file_and_line(block: Registration) -> str:
    """Return the file and line of a block, relative to the working folder if it is inside."""
    path = block.file.relative_to(Path.cwd()) if block.file.is_relative_to(Path.cwd()) else block.file
    return f"{path}:{block.line}"


def clashes_of_libraries(
    inspections: Sequence[LibraryInspection], registered: ProcessRegistrations | None = None
) -> list[Clash]:
    """Return the clashes among libraries, and with those already loaded."""
    claimed = dict(registered.claims) if registered else {}
    defined = dict(registered.operators) if registered else {}
    clashes = []
    for library in inspections:
        file = str(library.paths[0])
        taken = [name for name in library.claimed_namespaces if name in claimed]
        clashes += [Clash(name, claimed[name], file) for name in taken]
        redefined = [name for name in library.operators if name in defined and name.partition("::")[0] not in taken]
        clashes += [Clash(name.partition("::")[0], defined[name], file, name.partition("::")[2]) for name in redefined]
        claimed = dict.fromkeys(library.claimed_namespaces, file) | claimed
        defined = dict.fromkeys(library.operators, file) | defined
    return clashes


def load(*libraries: Path) -> dict[str, str]:
    """Load libraries into this process after test-loading them in another; return what they add.

    A clash is an error, and never an abort.
    """
    import torch  # the process that loads operators has it

    looks = inspect_libraries([[path] for path in libraries if str(path.resolve()) not in torch.ops.loaded_libraries])
    for library in looks:
        if library.error:
            raise OpforgeError(f"{library.paths[0]} cannot be loaded: {library.error}")
    if clashes := clashes_of_libraries(
        looks, ProcessRegistrations.of_this_process({n for library in looks for n in library.namespaces})
    ):
        raise ClashError(clashes)
    for library in looks:
        torch.ops.load_library(str(library.paths[0].resolve()))
    return {name: schema for library in looks for name, schema in library.operators.items()}
