"""The same kernels judged on this machine without Ray and with it: verdicts, cases per second, and what Ray costs for each task.

    python benchmarks/ray_efficiency.py --kernels 120 --cases 50 --repeats 3

Once both run at the same time, each judging one kernel at a time, so that whatever else the machine does slows both alike; and once
one after the other, each with all cores, which says something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tiny import OP, TinyBackend, suite

from opforge.cases import Phase
from opforge.runs import RunConfig, run
from opforge.runs.execute.ray import connect
from opforge.runs.execute.ray.scheduler import split_job
from opforge.runs.execute.ray.shipment import pack
from opforge.runs.plan import make_plan
from opforge.runs.store import read_rows
from opforge.suites import SuiteOptions

Samples = list[tuple[float, int]]
"""When how many cases were judged."""


def judged(executor: str, kernels: int, cases: int, workers: int = 1) -> dict[str, Any]:
    """Judge once; return how far it was when, and the verdicts."""
    samples: Samples = []

    def progress(what: str, done: int, _total: int) -> None:
        if what == OP:
            samples.append((time.time(), done))

    with tempfile.TemporaryDirectory(prefix="opforge-bench-") as folder:
        backend = TinyBackend(Path(folder) / "kernels", kernels, faults=False)
        config = RunConfig("given", "tiny", executor=executor, workers=workers, timeout_s=60.0)
        start = time.time()
        run(config, Path(folder) / "run", suite=suite(cases), backend=backend, progress=progress)
        rows = sorted((r.kernel, r.id, r.verdict) for r in read_rows(Path(folder) / "run"))
    return {"start": start, "samples": samples, "rows": rows}


def together(kernels: int, cases: int) -> tuple[float, float, float, bool]:
    """Judge with both at once; return cases per second of each while both were at work, for how long, and whether verdicts are the same."""
    words = [sys.executable, __file__, "--kernels", str(kernels), "--cases", str(cases), "--only"]
    started = [subprocess.Popen([*words, name], stdout=subprocess.PIPE, text=True) for name in ("local", "ray")]
    local, there = (json.loads(one.communicate()[0].splitlines()[-1]) for one in started)
    begin = max(one["samples"][len(one["samples"]) // 20][0] for one in (local, there))
    end = min(one["samples"][-1][0] for one in (local, there))
    same = local["rows"] == there["rows"]
    return _rate(local["samples"], begin, end), _rate(there["samples"], begin, end), end - begin, same


def apart(kernels: int, cases: int, *, ray_first: bool) -> tuple[float, float, bool]:
    """Judge with one after the other, each with all cores; return cases per second of each, and whether verdicts are the same."""
    words = [
        sys.executable,
        __file__,
        "--kernels",
        str(kernels),
        "--cases",
        str(cases),
        "--workers",
        str(os.cpu_count()),
    ]
    found = {}
    for name in ("ray", "local") if ray_first else ("local", "ray"):
        done = subprocess.run([*words, "--only", name], stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    rates = {name: _rate(one["samples"][len(one["samples"]) // 10 :], 0, math.inf) for name, one in found.items()}
    return rates["local"], rates["ray"], found["local"]["rows"] == found["ray"]["rows"]


def _rate(samples: Samples, begin: float, end: float) -> float:
    within = [sample for sample in samples if begin <= sample[0] <= end]
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def task_ms(count: int) -> tuple[float, float]:
    """Return what an empty task like ours takes: one after the other, and with several under way."""
    ray = connect.load_ray()
    connect.start_local(ray, os.cpu_count() or 1)

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
    many = (time.perf_counter() - start) / count * 1000
    ray.shutdown()
    return apart, many


def parcel_bytes(cases: int) -> int:
    """Return the size of a task's message: a kernel with its file and cases."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig("given", "tiny")
        plan = make_plan(config, TinyBackend(Path(folder), 1, faults=False), suite(cases).load(SuiteOptions()))
        (chunk,) = split_job(plan.jobs[0], Phase.CORRECTNESS)
        return len(pickle.dumps(pack(chunk)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=120)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["local", "ray"], help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.only:
        print(json.dumps(judged(words.only, words.kernels, words.cases, words.workers)))
        return
    print(f"{words.kernels} kernels with {words.cases} cases each, without Ray and with it at the same time")
    ratios = []
    for number in range(1, words.repeats + 1):
        local, there, seconds, same = together(words.kernels, words.cases)
        ratios.append(there / local)
        print(
            f"{number}: local {local:.1f} cases/s, Ray {there:.1f} cases/s over {seconds:.0f} s, efficiency {ratios[-1]:.2f}, "
            f"verdicts {'identical' if same else 'DIFFERENT'}",
            flush=True,
        )
    print(f"efficiency of Ray against local: {statistics.median(ratios):.2f} (median of {len(ratios)})")
    print(f"one after the other, {os.cpu_count()} kernels at a time:")
    ratios = []
    for number in range(1, words.repeats + 1):
        local, there, same = apart(words.kernels, words.cases, ray_first=number % 2 == 0)
        ratios.append(there / local)
        print(
            f"{number}: local {local:.1f} cases/s, Ray {there:.1f} cases/s, efficiency {ratios[-1]:.2f}, "
            f"verdicts {'identical' if same else 'DIFFERENT'}",
            flush=True,
        )
    print(f"efficiency of Ray against local: {statistics.median(ratios):.2f} (median of {len(ratios)})")
    alone, many = task_ms(300)
    print(f"an empty task: {alone:.1f} ms one after the other, {many:.2f} ms with many under way")
    print(f"a task's message: {parcel_bytes(words.cases)} bytes")


if __name__ == "__main__":
    main()
