"""Find which of some kernels are to blame, by asking whether sets of them fail. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Fails = Callable[[Sequence[str]], bool]
"""Whether a model is wrong with just these kernels in place."""


@dataclass
class Blame:
    """Who is to blame: kernels that fail by themselves, and sets that fail only together."""

    guilty: list[str] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)
    trials: int = 0

    @property
    def named(self) -> set[str]:
        return {*self.guilty, *(name for group in self.together for name in group)}


def find(suspects: Sequence[str], fails: Fails, named: str = "") -> Blame:
    """Return who is to blame for the failure of all of them together; one who is ``named`` already is tried first.

    Sets are halved as long as a half fails by itself; both halves are looked into. Where a set fails and neither half does,
    one kernel after another is left out of it while it still fails. What is left when the guilty are taken out is asked
    again, so that one cannot hide behind another.
    """
    blame = Blame()

    def failing(names: Sequence[str]) -> bool:
        if not names:
            return False
        blame.trials += 1
        return fails(names)

    rest = list(suspects)
    known = True  # that all of them fail, the caller has seen
    if named in rest and failing([named]):
        blame.guilty.append(named)
        rest.remove(named)
        known = False
    while known or failing(rest):
        _look_into(rest, failing, blame)
        rest = [name for name in rest if name not in blame.named]
        known = False
    return blame


def _look_into(failing_set: Sequence[str], failing: Fails, blame: Blame) -> None:
    """Look into a set that is known to fail."""
    if len(failing_set) == 1:
        blame.guilty.append(failing_set[0])
        return
    middle = len(failing_set) // 2
    bad = [half for half in (failing_set[:middle], failing_set[middle:]) if failing(half)]
    for half in bad:
        _look_into(half, failing, blame)
    if not bad:
        _narrow(list(failing_set), failing, blame)


def _narrow(failing_set: list[str], failing: Fails, blame: Blame) -> None:
    """Leave out of a set what its failure does not need."""
    for name in list(failing_set):
        without = [other for other in failing_set if other != name]
        if failing(without):
            failing_set = without
    if len(failing_set) == 1:
        blame.guilty.append(failing_set[0])
    else:
        blame.together.append(failing_set)
