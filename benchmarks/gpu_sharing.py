"""What processes pay for sharing a GPU: starting CUDA, and waiting for a call, alone and beside others.

python benchmarks/gpu_sharing.py [--processes 24]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

AT_ONCE = (1, 4, 12)
MEASURED_S = 0.6
STEPS = ("start", "context and first memory", "first kernel", "first product")


def in_child(work: Callable[[], object]) -> tuple[int, int]:
    """Fork a process that writes what some work returns; return its pid and the pipe."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, json.dumps(work()).encode())
        os._exit(0)
    os.close(theirs)
    return pid, ours


def first_use() -> list[float]:
    """Return the seconds that each step of a process's first use of CUDA takes, and when all is done."""
    times = [time.monotonic()]

    def end_step() -> None:
        torch.cuda.synchronize()
        times.append(time.monotonic())

    torch.cuda.init()
    times.append(time.monotonic())
    numbers = torch.empty(16, device="cuda")
    times.append(time.monotonic())
    _ = numbers + 1
    end_step()
    square = torch.ones(32, 32, device="cuda")
    _ = square @ square
    end_step()
    return [*(after - before for before, after in itertools.pairwise(times)), times[-1]]


def start_many(total: int, at_once: int) -> None:
    """Print what each process's first use of CUDA costs if several start at once."""
    began = time.monotonic()
    running: dict[int, int] = {}
    rows, ends = [], []
    while len(rows) < total:
        while len(running) < at_once and len(rows) + len(running) < total:
            pid, pipe = in_child(first_use)
            running[pid] = pipe
        pid, _status = os.wait()
        ended = time.monotonic()
        *row, done = json.loads(os.read(running.pop(pid), 1 << 16))
        rows.append(row)
        ends.append(ended - done)
    medians = ", ".join(f"{step} {1000 * statistics.median(r[i] for r in rows):.0f}" for i, step in enumerate(STEPS))
    each = 1000 * (time.monotonic() - began) / total
    print(
        f"{at_once:2} at once: {each:4.0f} ms a process; medians, ms: {medians}, end {1000 * statistics.median(ends):.0f}",
        flush=True,
    )


def steady() -> dict[str, float]:
    """Return the time of small work in a process that has begun to use the GPU, µs."""
    numbers, host = torch.ones(1024, device="cuda"), torch.ones(1024)

    def many() -> None:
        for _ in range(50):
            _ = numbers + 1
        torch.cuda.synchronize()

    def one() -> None:
        _ = numbers + 1
        torch.cuda.synchronize()

    work: dict[str, Callable[[], object]] = {
        "warm up": one, "a call and a wait": one, "50 calls and a wait": many,
        "4 KiB to the GPU": lambda: host.to("cuda"), "4 KiB from the GPU": numbers.cpu,
    }  # fmt: skip
    found = {}
    for name, step in work.items():
        count, until = 0, time.monotonic() + MEASURED_S
        while (now := time.monotonic()) < until:
            step()
            count += 1
        found[name] = 1e6 * (now - until + MEASURED_S) / count
    del found["warm up"]
    return found


def share(processes: int) -> None:
    """Print the mean times of small work in several processes at once."""
    children = [in_child(steady) for _ in range(processes)]
    rows = [json.loads(os.read(pipe, 1 << 16)) for _, pipe in children]
    for pid, _ in children:
        os.waitpid(pid, 0)
    means = ", ".join(f"{name} {statistics.mean(row[name] for row in rows):.0f}" for name in rows[0])
    print(f"{processes:2} processes, µs: {means}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=24, help="processes to start one after another")
    given = parser.parse_args()
    for at_once in AT_ONCE:
        start_many(given.processes, at_once)
    for processes in (1, 2, *AT_ONCE[1:]):
        share(processes)


if __name__ == "__main__":
    main()
