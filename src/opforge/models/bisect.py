"""Find the faulty kernels by testing whether sets of them fail. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Fails = Callable[[Sequence[str]], bool]
"""Whether a model is wrong with only these kernels installed."""


@dataclass
class FaultyKernels:
    """The faulty kernels: those that fail by themselves, and sets that fail only together."""

    faulty: list[str] = field(default_factory=list)
    faulty_sets: list[list[str]] = field(default_factory=list)
    trials: int = 0

    @property
    def names(self) -> set[str]:
        return {*self.faulty, *(name for group in self.faulty_sets for name in group)}


def find_faulty(suspects: Sequence[str], fails: Fails, prime_suspect: str = "") -> FaultyKernels:
    """Return the kernels to blame when all of them together fail; ``prime_suspect`` is tried first.

    Sets are halved as long as a half fails by itself; both halves are searched. If a set fails and
    neither half does, its kernels are removed one by one while it still fails. The rest, without
    the faulty kernels, is tested again, so that one cannot hide behind another.
    """
    blame = FaultyKernels()

    def failing(names: Sequence[str]) -> bool:
        if not names:
            return False
        blame.trials += 1
        return fails(names)

    rest = list(suspects)
    known_to_fail = True  # the caller has seen all of them fail
    if prime_suspect in rest and failing([prime_suspect]):
        blame.faulty.append(prime_suspect)
        rest.remove(prime_suspect)
        known_to_fail = False
    while known_to_fail or failing(rest):
        _search_failing_set(rest, failing, blame)
        rest = [name for name in rest if name not in blame.names]
        known_to_fail = False
    return blame


def _search_failing_set(failing_set: Sequence[str], failing: Fails, result: FaultyKernels) -> None:
    """Search a set that is known to fail."""
    if len(failing_set) == 1:
        result.faulty.append(failing_set[0])
        return
    middle = len(failing_set) // 2
    failing_halves = [half for half in (failing_set[:middle], failing_set[middle:]) if failing(half)]
    for half in failing_halves:
        _search_failing_set(half, failing, result)
    if not failing_halves:
        _minimise_failing_set(list(failing_set), failing, result)


def _minimise_failing_set(failing_set: list[str], failing: Fails, result: FaultyKernels) -> None:
    """Remove the kernels that a set's failure does not need."""
    for name in list(failing_set):
        without = [other for other in failing_set if other != name]
        if failing(without):
            failing_set = without
    if len(failing_set) == 1:
        result.faulty.append(failing_set[0])
    else:
        result.faulty_sets.append(failing_set)
