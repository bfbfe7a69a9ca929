"""A soak on Ray: many cases of tiny kernels, 1 % of which crash and 1 % hang, while Ray workers and nodes are killed.

    python benchmarks/soak.py --cases 100000 --out benchmarks/results/soak-x86_64-2cores.txt

Says whether every case was judged once and rightly, how long it took, and the memory of the driver over time. Starts its own cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tiny import TinyBackend, suite

from opforge.runs import RunConfig, run
from opforge.runs.execute.ray import connect
from opforge.runs.execute.ray.executor import TASKS, RayCluster
from opforge.runs.store import read_rows

CASES_PER_KERNEL = 100
WIDTH = 60


class Killer:
    """Kills at random: a Ray worker, the fork server in one, or now and then the spare node, in whose place comes another.

    What runs a kernel is left alone: its death is that kernel's verdict.
    """

    def __init__(self, cluster: Any, every_s: float, node_every_s: float) -> None:
        self.killed: Counter[str] = Counter()
        self._cluster = cluster
        self._every_s = every_s
        self._node_every_s = node_every_s
        self._chance = random.Random(7)
        self._spare = cluster.add_node(num_cpus=1)
        self._next = self._next_node = float("inf")

    def tick(self) -> None:
        """Kill if it is time to; called in the main thread, where alone a node can be started."""
        now = time.monotonic()
        if now > self._next_node:
            self._cluster.remove_node(self._spare, allow_graceful=False)
            self.killed["node"] += 1
            self._spare = self._cluster.add_node(num_cpus=1)
        elif now > self._next:
            self._kill(self._chance)
        if now > self._next_node or self._next_node == float("inf"):
            self._next_node = now + self._node_every_s
        if now > self._next or self._next == float("inf"):
            self._next = now + self._chance.uniform(0.5, 1.5) * self._every_s

    def _kill(self, chance: random.Random) -> None:
        workers = [p for p in psutil.Process().children(recursive=True) if _says(p, "ray::judge")]
        if not workers:
            return
        victim, what = chance.choice(workers), "Ray worker"
        servers = [c for c in _children(victim) if _says(c, "opforge.sandbox.host.fork_server")]
        if servers and chance.random() < 0.5:
            victim, what = servers[0], "fork server"
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
            self.killed[what] += 1


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def _says(process: psutil.Process, word: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word in part for part in process.cmdline())
    return False


@dataclass
class Meter:
    """The driver's memory over time, and how far the run is."""

    samples: list[tuple[float, int, float]] = field(default_factory=list)
    """Seconds since the start, cases judged, MiB."""
    start: float = field(default_factory=time.monotonic)
    next: float = 0.0

    def __call__(self, _what: str, done: int, _total: int) -> None:
        now = time.monotonic() - self.start
        if now >= self.next:
            self.next = now + 2.0
            self.samples.append((now, done, psutil.Process().memory_info().rss / 2**20))
            if len(self.samples) % 15 == 0:
                print(f"{now:.0f} s: {done} cases, {self.samples[-1][2]:.0f} MiB", flush=True)

    def plot(self) -> list[str]:
        """Return the memory over time as lines of text, from zero."""
        picked = self.samples[:: max(1, len(self.samples) // 24)]
        most = max(mib for _, _, mib in picked)
        return [
            f"{seconds:7.0f} s {done:8} cases {mib:6.0f} MiB {'#' * round(WIDTH * mib / most)}"
            for seconds, done, mib in picked
        ]


def soak(kernels: int, folder: Path, words: argparse.Namespace) -> list[str]:
    """Run once; return what is to be told."""
    connect.load_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray = connect.load_ray()
    connect.connect(ray, cluster.address)
    killer = Killer(cluster, words.kill_every, words.node_every)
    meter = Meter()

    def progress(what: str, done: int, total: int) -> None:
        meter(what, done, total)
        if done:
            killer.tick()

    backend = TinyBackend(folder / "kernels", kernels, faults=True)
    config = RunConfig(
        "given", "tiny", executor="ray", workers=RayCluster.default_workers, timeout_s=words.timeout, dtypes=("f32",)
    )
    try:
        start = time.monotonic()
        run(config, folder / "run", suite=suite(CASES_PER_KERNEL), backend=backend, progress=progress)
        took = time.monotonic() - start
    finally:
        ray.shutdown()
        cluster.shutdown()
    return _told(folder / "run", backend, kernels, took, killer.killed) + meter.plot()


def _told(out: Path, backend: TinyBackend, kernels: int, took: float, killed: Counter[str]) -> list[str]:
    keys: Counter[tuple[str, str]] = Counter()
    found: dict[str, Counter[str]] = {"passed": Counter(), "crashed": Counter(), "timed_out": Counter()}
    for row in read_rows(out):
        keys[row.kernel, row.id] += 1
        found[backend.fault(int(row.kernel.rpartition("_")[2]))][row.verdict] += 1
    wanted = kernels * CASES_PER_KERNEL
    ends = Counter(line.rpartition('"end": "')[2].rstrip('"}\n') for line in (out / TASKS).open())
    once = sum(1 for n in keys.values() if n == 1)
    return [
        f"{wanted} cases of {kernels} kernels in {took:.0f} s, {wanted / took:.0f} cases/s",
        f"judged once: {once}, more than once: {len(keys) - once}, never: {wanted - len(keys)}",
        *(f"verdicts on kernels that should be {kind}: {dict(counts)}" for kind, counts in found.items()),
        f"killed meanwhile: {dict(killed)}; tasks by their end: {dict(ends)}",
        "memory of the driver:",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds that one case may take")
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds between kills, on average")
    parser.add_argument("--node-every", type=float, default=120.0, help="seconds between losses of a node")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opforge-soak-") as folder:
        lines = soak(max(1, words.cases // CASES_PER_KERNEL), Path(folder), words)
    print("\n".join(lines))
    if words.out is not None:
        words.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
