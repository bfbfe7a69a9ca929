"""The same kernels judged on this machine without Ray and with it: verdicts, cases per second, and what Ray costs for each task.

python benchmarks/ray_efficiency.py --kernels 200 --cases 50 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tiny import OP, TinyBackend, suite

from opforge.cases import Phase
from opforge.runs import RunConfig, run
from opforge.runs.cluster import joining
from opforge.runs.cluster.executor import RayCluster
from opforge.runs.cluster.flow import chunks
from opforge.runs.cluster.parcels import packed
from opforge.runs.plan import make_plan
from opforge.runs.store import read_rows
from opforge.suites import SuiteOptions

_LEFT_OUT = 0.25
"""Of a run, at its beginning, where processes still start."""


def judged(executor: str, kernels: int, cases: int, workers: int) -> tuple[float, float, set[tuple[str, str, str]]]:
    """Return cases per second once all lanes are at work, the seconds of the whole run, and the verdicts."""
    first: list[tuple[float, int]] = []
    last = (0.0, 0)

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        last = (time.monotonic(), done)
        if what == OP and not first and done >= total * _LEFT_OUT:
            first.append(last)

    with tempfile.TemporaryDirectory(prefix="opforge-bench-") as folder:
        backend = TinyBackend(Path(folder) / "kernels", kernels, faults=False)
        config = RunConfig("given", "tiny", executor=executor, workers=workers, timeout_s=20.0)
        start = time.monotonic()
        run(config, Path(folder) / "run", suite=suite(cases), backend=backend, progress=progress)
        end = time.monotonic()
        rows = {(r["kernel"], r["id"], r["verdict"]) for r in read_rows(Path(folder) / "run")}
    return (last[1] - first[0][1]) / (last[0] - first[0][0]), end - start, rows


def task_ms(count: int) -> tuple[float, float]:
    """Return what an empty task like ours takes: one after the other, and with several under way."""
    ray = joining.load_ray()
    joining.start(ray, os.cpu_count() or 1)

    def nothing() -> Any:
        yield {"began": 0}
        yield {"rows": []}

    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(nothing)
    for one in [remote.remote() for _ in range(8)]:
        list(one)
    start = time.perf_counter()
    for _ in range(count):
        for reference in remote.remote():
            ray.get(reference)
    apart = (time.perf_counter() - start) / count * 1000
    start = time.perf_counter()
    flying = [remote.remote() for _ in range(count)]
    for one in flying:
        for reference in one:
            ray.get(reference)
    together = (time.perf_counter() - start) / count * 1000
    ray.shutdown()
    return apart, together


def parcel_bytes(cases: int) -> int:
    """Return the size of a task's message: a kernel with its file and cases."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig("given", "tiny")
        plan = make_plan(config, TinyBackend(Path(folder), 1, faults=False), suite(cases).load(SuiteOptions()))
        (chunk,) = chunks(plan.jobs[0], Phase.CORRECTNESS)
        return len(pickle.dumps(packed(chunk)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=200)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    cores = os.cpu_count() or 1
    print(f"{words.kernels} kernels with {words.cases} cases each, {cores} at once on {cores} cores")
    ratios = []
    for number in range(1, words.repeats + 1):
        local, local_whole, one = judged("local", words.kernels, words.cases, cores)
        there, there_whole, other = judged("ray", words.kernels, words.cases, RayCluster.default_workers)
        ratios.append(there / local)
        same = "identical" if one == other else "DIFFERENT"
        print(
            f"{number}: local {local:.0f} cases/s (whole run {local_whole:.1f} s), Ray {there:.0f} cases/s (whole run {there_whole:.1f} s), "
            f"efficiency {ratios[-1]:.2f}, verdicts {same}",
            flush=True,
        )
    print(f"efficiency of Ray against local: {statistics.median(ratios):.2f} (median of {len(ratios)})")
    apart, together = task_ms(300)
    print(f"an empty task: {apart:.1f} ms one after the other, {together:.2f} ms with many under way")
    print(f"a task's message: {parcel_bytes(words.cases)} bytes")


if __name__ == "__main__":
    main()
