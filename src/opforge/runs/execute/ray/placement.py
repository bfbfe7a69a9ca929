"""Placement of tasks.

Judging takes a share of a CPU or GPU. Timing takes a whole GPU, or all CPUs of a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from opforge.cases import Phase

KERNELS_PER_GPU = 4
"""Number of kernels judged on one GPU at once."""
TASKS_PER_SLOT = 2
"""Tasks handed to Ray for each that can run: the next is on its node when one ends."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def from_ray(cls, row: dict[str, Any]) -> Node:
        resources = row["Resources"]
        return cls(row["NodeID"], row["NodeManagerAddress"], int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """A task's request: resources, and a preferred or required node."""

    cpus: float
    gpus: float = 0.0
    node: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement rules for one kind of device."""

    gpu: bool

    def usable(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes that can judge."""
        return [n for n in nodes if n.cpus >= 1 and (n.gpus >= 1 or not self.gpu)]

    def slots(self, nodes: Iterable[Node], phase: Phase) -> int:
        """Return the number of tasks of a phase that can run at once."""
        usable = self.usable(nodes)
        if phase is Phase.PERFORMANCE:
            return sum(min(n.cpus, n.gpus) if self.gpu else 1 for n in usable)
        return sum(min(n.cpus, n.gpus * KERNELS_PER_GPU) if self.gpu else n.cpus for n in usable)

    def max_tasks(self, nodes: Iterable[Node], phase: Phase, workers: int) -> int:
        """Return how many tasks may be in flight: at most the user's limit.

        Where all can run, some more are handed out to wait.
        """
        slots = self.slots(nodes, phase)
        if phase is Phase.PERFORMANCE and not self.gpu:
            return min(workers, slots)
        return slots * TASKS_PER_SLOT if workers >= slots * TASKS_PER_SLOT else min(workers, slots)

    def request(
        self, nodes: Iterable[Node], phase: Phase, pinned_counts: Counter[str], preferred_node: str = ""
    ) -> TaskRequest | None:
        """Return the next task's request; None if it must wait for a node.

        ``pinned_counts`` counts the tasks pinned to each node. ``preferred_node`` has the kernel's
        files in its cache.
        """
        if self.gpu or phase is Phase.CORRECTNESS:
            share = 1.0 if phase is Phase.PERFORMANCE else 1.0 / KERNELS_PER_GPU
            return TaskRequest(1.0, share if self.gpu else 0.0, preferred_node)
        free = [n for n in self.usable(nodes) if not pinned_counts[n.id]]
        chosen = next((n for n in free if n.id == preferred_node), free[0] if free else None)
        return None if chosen is None else TaskRequest(float(chosen.cpus), node=chosen.id, pinned=True)
