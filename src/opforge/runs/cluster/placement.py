"""Where tasks go: a share of a CPU or GPU to be judged, a whole GPU, or a whole machine's CPUs, to be timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from opforge.cases import Phase

PER_GPU = 4
"""How many kernels are judged on one GPU at once."""
AHEAD = 2
"""How many tasks are handed to Ray for each that can run: the next is on its node when one ends."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def from_ray(cls, row: dict[str, Any]) -> Node:
        has = row["Resources"]
        return cls(row["NodeID"], row["NodeManagerAddress"], int(has.get("CPU", 0)), int(has.get("GPU", 0)))


@dataclass(frozen=True, slots=True)
class Place:
    """What a task asks for: resources, and a node where that one is better than others, or it must be that one."""

    cpus: float
    gpus: float = 0.0
    node: str = ""
    must: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The rules for one kind of device."""

    gpu: bool

    def usable(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes on which anything can be judged."""
        return [n for n in nodes if n.cpus >= 1 and (n.gpus >= 1 or not self.gpu)]

    def slots(self, nodes: Iterable[Node], phase: Phase) -> int:
        """Return how many tasks of a phase can run at once."""
        usable = self.usable(nodes)
        if phase is Phase.PERFORMANCE:
            return sum(min(n.cpus, n.gpus) if self.gpu else 1 for n in usable)
        return sum(min(n.cpus, n.gpus * PER_GPU) if self.gpu else n.cpus for n in usable)

    def most(self, nodes: Iterable[Node], phase: Phase, workers: int) -> int:
        """Return how many tasks may be under way: no more than a user allows, and some to wait where all can run."""
        slots = self.slots(nodes, phase)
        if phase is Phase.PERFORMANCE and not self.gpu:
            return min(workers, slots)
        return slots * AHEAD if workers >= slots * AHEAD else min(workers, slots)

    def place(self, nodes: Iterable[Node], phase: Phase, taken: Counter[str], home: str = "") -> Place | None:
        """Return what the next task asks for; None where it must wait for a node.

        ``taken`` counts the tasks that must be on a node; ``home`` is the node whose cache has what the kernel needs.
        """
        if self.gpu or phase is Phase.CORRECTNESS:
            share = 1.0 if phase is Phase.PERFORMANCE else 1.0 / PER_GPU
            return Place(1.0, share if self.gpu else 0.0, home)
        free = [n for n in self.usable(nodes) if not taken[n.id]]
        chosen = next((n for n in free if n.id == home), free[0] if free else None)
        return None if chosen is None else Place(float(chosen.cpus), node=chosen.id, must=True)
