"""A simulated cluster of three Ray nodes on this machine, two pretended GPUs each: which GPU had which timing, from the run's own record.

python benchmarks/ray_placement.py --kernels 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tiny import TinyBackend, suite

from opforge import registry
from opforge.cases import Phase
from opforge.runs import RunConfig, run
from opforge.runs.execute.ray import connect
from opforge.runs.execute.ray.executor import TASKS, RayCluster
from opforge.runs.execute.ray.placement import Placement


class PretendedGpus(RayCluster):
    """Asks for GPUs, and judges on the CPU."""

    def __init__(self, config: RunConfig, server: Any = None) -> None:
        super().__init__(config, server, Placement(gpu=True))


def record(kernels: int) -> list[dict[str, Any]]:
    """Run on the simulated cluster; return the lines of tasks.jsonl."""
    ray = connect.load_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=4, num_gpus=2)
    connect.connect(ray, cluster.address)
    registry.BUILTIN["executors"]["ray"] = f"{__name__}:PretendedGpus"
    try:
        with tempfile.TemporaryDirectory(prefix="opforge-bench-") as folder:
            config = RunConfig("given", "tiny", executor="ray", workers=RayCluster.default_workers)
            backend = TinyBackend(Path(folder) / "kernels", kernels, faults=False)
            run(config, Path(folder) / "run", suite=suite(4, timed=True), backend=backend)
            return [json.loads(line) for line in (Path(folder) / "run" / TASKS).open()]
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=12)
    tasks = record(parser.parse_args().kernels)
    start = min(task["began"] for task in tasks)
    names = {node: f"node {number}" for number, node in enumerate(sorted({t["node"] for t in tasks}), 1)}
    places: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for task in tasks:
        if task["phase"] == Phase.PERFORMANCE.value:
            places[names[task["node"]], task["gpus"][0]].append((task["began"] - start, task["ended"] - start))
    shared = 0
    for (node, gpu), spans in sorted(places.items()):
        spans.sort()
        shared += sum(one[1] > other[0] for one, other in itertools.pairwise(spans))
        print(f"{node} GPU {gpu}: " + ", ".join(f"{began:.1f} to {ended:.1f} s" for began, ended in spans))
    judged = sum(1 for task in tasks if task["phase"] == Phase.CORRECTNESS.value)
    print(
        f"{judged} tasks judged on shares of GPUs, {sum(map(len, places.values()))} timed; timings that shared a GPU: {shared}"
    )


if __name__ == "__main__":
    main()
