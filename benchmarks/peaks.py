"""The measured peaks of a device: bandwidth by size of the working set, rates of arithmetic, the smallest launch and call.

    python benchmarks/peaks.py [--device cuda] [--cached]

They are measured anew, as a run does when its cache has none, and kept there; ``--cached`` shows what is kept.
"""

from __future__ import annotations

import argparse
import time

from opforge.judge.roofline.peaks import cache_path, load_or_measure
from opforge.runs.execute.judge_pool import start_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--cached", action="store_true", help="show what the cache has, if it has it")
    words = parser.parse_args()
    server = start_server(words.device)
    try:
        spawner = server.spawner  # waits for torch
        began = time.perf_counter()
        peaks = load_or_measure(spawner, words.device, remeasure=not words.cached)
        took = time.perf_counter() - began
    finally:
        server.close()
    print(f"{peaks.device} ({peaks.device_type}), {took:.2f} s; kept in {cache_path(peaks.device)}")
    print(f"{'working set':>12}{'GB/s':>10}{'in place':>10}")
    twice = dict(peaks.in_place_curve)
    for size, rate in peaks.bandwidth_curve:
        shown = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        print(f"{shown:>12}{rate / 1e9:>10.1f}{twice.get(size, 0) / 1e9:>10.1f}")
    for kind, rate in peaks.rates.items():
        print(f"{kind:>14}: {rate / 1e9:10.1f} GFLOP/s")
    launch = "none" if peaks.launch_us is None else f"{peaks.launch_us:.2f} µs"
    print(f"smallest launch {launch}; smallest call {peaks.call_us:.2f} µs")


if __name__ == "__main__":
    main()
