"""Find the faulty kernels by testing whether sets of them fail. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Fails = Callable[[Sequence[str]], bool]
"""Whether a model is wrong with only these kernels installed."""


@dataclass
class Blame:
    """The faulty kernels: those that fail by themselves, and sets that fail only together."""

    guilty: list[str] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)
    trials: int = 0

    @property
    def named(self) -> set[str]:
        return {*self.guilty, *(name for group in self.together for name in group)}


def find(suspects: Sequence[str], fails: Fails, named: str = "") -> Blame:
    """Return the kernels to blame when all of them together fail; ``named`` is tried first.

    Sets are halved as long as a half fails by itself; both halves are searched. If a set fails and
    neither half does, its kernels are removed one by one while it still fails. The rest, without
    the faulty kernels, is tested again, so that one cannot hide behind another.
    """
    blame = Blame()

    def failing(names: Sequence[str]) -> bool:
        if not names:
            return False
        blame.trials += 1
        return fails(names)

    rest = list(suspects)
    known_to_fail = True  # the caller has seen all of them fail
    if named in rest and failing([named]):
        blame.guilty.append(named)
        rest.remove(named)
        known_to_fail = False
    while known_to_fail or failing(rest):
        _search_failing_set(rest, failing, blame)
        rest = [name for name in rest if name not in blame.named]
        known_to_fail = False
    return blame


def _search_failing_set(failing_set: Sequence[str], failing: Fails, blame: Blame) -> None:
    """Search a set that is known to fail."""
    if len(failing_set) == 1:
        blame.guilty.append(failing_set[0])
        return
    middle = len(failing_set) // 2
    failing_halves = [half for half in (failing_set[:middle], failing_set[middle:]) if failing(half)]
    for half in failing_halves:
        _search_failing_set(half, failing, blame)
    if not failing_halves:
        _narrow(list(failing_set), failing, blame)


def _narrow(failing_set: list[str], failing: Fails, blame: Blame) -> None:
    """Remove the kernels that a set's failure does not need."""
    for name in list(failing_set):
        without = [other for other in failing_set if other != name]
        if failing(without):
            failing_set = without
    if len(failing_set) == 1:
        blame.guilty.append(failing_set[0])
    else:
        blame.together.append(failing_set)
