"""Cases per second with every kernel in a process of its own, against a plain loop in one process over the same cases.

    python benchmarks/opinfo_throughput.py [--dtype bf16] [--workers 2] [--repeats 2] [--cold]

The plain loop is what an evaluator without isolation does: make the inputs twice, call ATen as the reference, call it again
as the kernel, compare with ``torch.testing.assert_close``. ``--cold`` also records the suite into an empty cache first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from opforge.cases import Case
from opforge.cases.case_files import open_blob
from opforge.procs.channel import Channel
from opforge.runs import RunConfig, run
from opforge.runs.execute.judge_pool import start_server
from opforge.sandbox.guard.confinement import Confinement
from opforge.suites.base import SuiteOptions
from opforge.suites.opinfo.suite import OpInfoSuite


def plain_loop(dtype: str) -> dict[str, Any]:
    """Judge ATen against itself in this very process."""
    import numpy as np
    import torch

    from opforge.cases.tensors import owned_copy, tensor_from_row, write_storage
    from opforge.cases.values import TensorSpec
    from opforge.cases.wire import decode
    from opforge.ops import table
    from opforge.ops.undefined import UNDEFINED_CONTENTS

    torch.set_num_threads(1)
    suite = OpInfoSuite().load(SuiteOptions("cpu", (dtype,)))
    blobs = {name: open_blob(path) for name, path in suite.blobs.items()}

    def arguments(case: Case) -> tuple[list[Any], dict[str, Any]]:
        def tensor(row: list[Any]) -> torch.Tensor:
            at, nbytes, short, shape, strides, offset, device, *bounds = row
            storage = np.empty(nbytes, np.uint8)
            spec = TensorSpec(tuple(shape), short, tuple(strides), offset, device, at, nbytes, *bounds)
            write_storage(spec, storage, blobs.get(case.blob), case.id)
            return owned_copy(tensor_from_row(storage, [0, *row[1:7]]))

        args, kwargs = json.loads(case.tree)
        return decode(args, tensor), {n: decode(v, tensor) for n, v in kwargs.items()}

    start = time.perf_counter()
    count = different = 0
    for op, cases in suite.cases.items():
        facts = table().get(op)
        function = getattr(getattr(torch.ops.aten, facts.base), facts.overload)
        for case in cases:
            answers = []
            for _ in range(2):
                args, kwargs = arguments(case)
                torch.manual_seed(0)
                try:
                    answers.append(function(*args, **kwargs))
                except Exception as error:  # wrong inputs are cases too
                    answers.append(str(type(error)))
            try:
                if facts.base not in UNDEFINED_CONTENTS and not isinstance(answers[0], str | type(None)):
                    torch.testing.assert_close(answers[1], answers[0], equal_nan=True)
            except AssertionError:
                different += 1
            count += 1
    return {"cases": count, "seconds": time.perf_counter() - start, "different": different}


def isolated(dtype: str, workers: int) -> dict[str, Any]:
    """Run the whole suite the way `opforge run` does, and watch its main process."""
    first: list[float] = []
    done: list[int] = []
    start = time.perf_counter()

    def progress(what: str, count: int, _total: int) -> None:
        if not what.startswith("recording"):
            first.append(time.perf_counter() - start) if not first else None
            done.append(count)

    with tempfile.TemporaryDirectory() as folder:
        ended = run(
            RunConfig("opinfo", "aten", dtypes=(dtype,), workers=workers), Path(folder) / "run", progress=progress
        )
    seconds = time.perf_counter() - start
    passed = ended.summary.case_counts["passed"]
    return {"cases": done[-1], "seconds": seconds, "first_verdict_s": first[0], "passed": passed}


def in_process(what: str, *args: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one of the measurements in a fresh interpreter and return its figures and its peak memory."""
    command = [sys.executable, __file__, "--only", what, *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **(environment or {})}
    )
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            try:
                peak[0] = max(peak[0], psutil.Process(process.pid).memory_info().rss)
            except psutil.Error:
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = process.communicate()[0]
    watcher.join()
    return {**json.loads(output.strip().splitlines()[-1]), "main_mib": peak[0] / 2**20}


def import_torch_s() -> float:
    """Return how long importing torch takes, which no first verdict can do without."""
    code = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(done.stdout) for done in runs)


def fresh_worker_ms(count: int = 50, *, confined: bool = True) -> list[float]:
    """Return how long it takes from asking for a worker, its folder included, until it answers its first request."""
    server = start_server("cpu")
    spawner = server.spawner
    folder = spawner.folder()
    times = []
    for _ in range(count):
        arena = os.memfd_create("bench")
        os.ftruncate(arena, 1 << 20)
        start = time.perf_counter()
        ours, theirs = Channel.pair()
        settings: dict[str, Any] = {"device": "cpu", "arena_bytes": 1 << 20, "results_offset": 1 << 19, "memory": True}
        if confined:
            settings["confinement"] = asdict(Confinement(tempfile.mkdtemp(dir=folder)))
        pid = spawner.spawn(
            "worker", settings, [theirs.fileno(), arena], limits={"memory_bytes": 8 << 30}, output=False
        )
        theirs.close()
        ours.send({"do": "load", "kernel": {"file": None, "primary": "relu.default", "entries": []}})
        _greeting, (memory,) = ours.receive_with_fds(10)
        os.close(memory)
        ours.receive(10)
        times.append((time.perf_counter() - start) * 1000)
        ours.close()
        spawner.stop(pid)
        os.close(arena)
    server.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="also record the suite into an empty cache")
    parser.add_argument("--only", choices=["plain", "isolated"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    words = ["--dtype", options.dtype, "--workers", str(options.workers)]
    if options.only:
        print(
            json.dumps(
                plain_loop(options.dtype) if options.only == "plain" else isolated(options.dtype, options.workers)
            )
        )
        return
    if options.cold:
        with tempfile.TemporaryDirectory() as cache:
            cold = in_process("isolated", *words, environment={"OPFORGE_CACHE": cache})
        print(
            f"cold cache, recorded and judged: {cold['cases']} cases in {cold['seconds']:.1f} s, {cold['cases'] / cold['seconds']:.0f}/s"
        )
    in_process("isolated", *words)  # fills the cache
    print(
        f"{'':8}{'cases':>8}{'plain s':>10}{'isolated s':>12}{'plain/s':>10}{'isolated/s':>12}{'ratio':>8}{'first verdict s':>17}{'main MiB':>10}"
    )
    ratios = []
    for number in range(1, options.repeats + 1):
        plain, ours = in_process("plain", *words), in_process("isolated", *words)
        rates = plain["cases"] / plain["seconds"], ours["cases"] / ours["seconds"]
        ratios.append(rates[1] / rates[0])
        print(
            f"{number:<8}{ours['cases']:>8}{plain['seconds']:>10.1f}{ours['seconds']:>12.1f}{rates[0]:>10.0f}{rates[1]:>12.0f}"
            f"{ratios[-1]:>8.2f}{ours['first_verdict_s']:>17.2f}{ours['main_mib']:>10.0f}",
            flush=True,
        )
    print(
        f"isolated against plain: {statistics.median(ratios):.2f} (median of {len(ratios)}; above 1 is faster than the plain loop)"
    )
    print(
        f"for scale, `import torch` in a fresh interpreter: {import_torch_s():.2f} s (median of 5); it is part of the first verdict"
    )
    for confined in (True, False):
        times = sorted(fresh_worker_ms(confined=confined))
        how = "confined" if confined else "unconfined"
        print(
            f"fresh worker, {how}: median {statistics.median(times):.1f} ms, worst {times[-1]:.1f} ms of {len(times)}"
        )


if __name__ == "__main__":
    main()
