"""The ruler measured against itself: A/A, known ratios, a kernel of known time, and what a race costs; triton's do_bench beside it.

    python benchmarks/timer.py [--device cuda|cpu] [--repeats 3] [--load] [--only WORD] [--parts aa,bias,known]

A/A: ATen against ATen in two workers, on operator calls of real models. Bias: a Triton kernel that spins for some time, once
and twice in a call. Known: a kernel of about a microsecond, by graphs of two lengths, whose fixed cost drops out of the
difference. ``--load`` (CPU) keeps every core busy with another process meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_cases import MODEL_CASES

from opforge.cases import Case
from opforge.cases.case import Expect, Phase
from opforge.judge.batch import Batch, BatchEntry, CaseRow
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig
from opforge.judge.timing.cpu_race import CpuRace
from opforge.judge.timing.gpu_race import BaselineError, GpuRace
from opforge.ops import table
from opforge.runs.execute.judge_pool import start_server
from opforge.runtime.trees import instances
from opforge.sandbox.host.request import WorkerRequest

CPU_MODELS = ("gpt2 decode", "bert 8x128", "bert training", "llama decode", "resnet 1", "t5", "mixtral", "adam")
"""Those whose calls take no longer than some ms on one core."""
SPIN = """
import torch, triton, triton.language as tl

@triton.jit
def spin(out, ns):
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < ns:
        pass
    tl.store(out, 1.0)

def neg_kernel_impl(self):
    result = torch.empty_like(self)
    for _ in range({times}):
        spin[(1,)](result, {ns}, num_warps=1)
    return result
"""
TOUCH = """
import torch, triton, triton.language as tl

@triton.jit
def negate(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, -tl.load(x + at, mask=at < n), mask=at < n)

def add_kernel_impl(self, other, *, alpha=1):
    results = self.new_empty((2, *self.shape))
    for x, result in list(zip((self, other), results))[:{times}]:
        n = x.numel()
        negate[(triton.cdiv(n, 1024),)](x, result, n, BLOCK=1024)
    return results[0]
"""


class Ring:
    """Two workers on one device, and races between them."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._server = start_server(self.device.type)
        self._config = WorkerConfig(device, 60.0, None)
        self._workers = [KernelWorker(self._server.spawner, self._config) for _ in range(2)]
        self._loaded: list[str | None] = ["", ""]
        self.spent: Counter[str] = Counter()
        """Seconds of the present race, by what the workers are asked."""
        self._step = ""
        for worker in self._workers:
            self._count(worker)

    def _count(self, worker: KernelWorker) -> None:
        """Count where the time goes: from a question's sending to its answer, by its kind."""
        begin, answer = worker.begin, worker.answer
        asked: list[tuple[str, float]] = []

        def beginning(request: WorkerRequest | dict[str, Any]) -> None:
            wire = request.wire() if isinstance(request, WorkerRequest) else request
            self._step = wire.get("quantity", self._step if wire["do"] == "run" else "")
            asked.append((f"{wire['do']} {self._step}", time.perf_counter()))
            begin(request)

        def answering(**words: Any) -> Any:
            reply = answer(**words)
            what, since = asked.pop()
            self.spent[what] += time.perf_counter() - since
            return reply

        worker.begin, worker.answer = beginning, answering  # type: ignore[method-assign]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._server.close()

    def race(self, op: str, text: str, files: tuple[str | None, str | None] = (None, None)) -> dict[str, Any]:
        """Race two kernels on a case; None stands for ATen."""
        facts = table().get(op)
        assert facts is not None, op
        for number, file in enumerate(files):
            if self._loaded[number] != file:
                kernel = {
                    "file": file,
                    "primary": op,
                    "entries": [f"{op.split('.', maxsplit=1)[0]}_kernel_impl"],
                    "name": "timed",
                }
                reply = self._workers[number].ask({"do": "load", "kernel": kernel})
                assert "error" not in reply, reply
                self._loaded[number] = file
        batch, entry = placed_case(op, text, self.device)
        for worker in self._workers:
            batch.copy_to(worker.arena_view)
        nbytes = sum(row[1] for row in entry.input_rows) + sum(
            t.nbytes for t in instances(entry.answer.result, torch.Tensor)
        )
        begun = time.perf_counter()
        race: GpuRace | CpuRace = (
            CpuRace(*self._workers, op, entry, None, writes_inputs=facts.mutates)
            if self.device.type == "cpu"
            else GpuRace(*self._workers, op, entry, None, self.device, writes_inputs=facts.mutates)
        )
        self.spent.clear()
        row = race.run()
        row |= {"seconds": time.perf_counter() - begun, "nbytes": nbytes, "notes": race.notes}
        return {**row, "ms": {step: 1000 * spent for step, spent in self.spent.items()}}


@functools.lru_cache(1)
def placed_case(op: str, text: str, device: torch.device) -> tuple[Batch, BatchEntry]:
    """Return a case with its inputs made; the same once more where it is asked for again."""
    facts = table().get(op)
    assert facts is not None, op
    case = Case.make(op, text, phase=Phase.PERFORMANCE)
    batch = Batch(facts, device, 1 << 30, {}, np.zeros(1 << 20, np.uint8))
    entry = batch.add(CaseRow(case.id, text, "", Expect.RETURNS, Phase.PERFORMANCE, ""))
    assert entry is not None
    assert entry.answer.raised is None, entry.answer.raised
    return batch, entry


def arguments(op: str, text: str, device: torch.device) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Return ATen's function and one set of arguments, for rulers that work in this process."""
    args, kwargs, _ = placed_case(op, text, device)[1].call.build_arguments()
    packet, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload), args, kwargs


def do_bench(op: str, text: str, device: torch.device) -> tuple[float, float, float]:
    """Return two times in µs by triton's do_bench, and the seconds that both took."""
    from triton.testing import do_bench as bench

    function, args, kwargs = arguments(op, text, device)
    begun = time.perf_counter()
    first, second = (1000 * bench(lambda: function(*args, **kwargs), return_mode="median") for _ in range(2))
    return first, second, time.perf_counter() - begun


def quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


def against_itself(ring: Ring, repeats: int, only: str) -> dict[str, Any]:
    """Race ATen against ATen on each case, and print a table."""
    cuda = ring.device.type == "cuda"
    rows = []
    print(
        f"{'model':14}{'operator':34}{'µs':>9}{'ratio−1 %':>11}{'interval %':>18}{'rounds':>7}{'s':>7}"
        + ("   do_bench µs  A/A %      s" if cuda else "")
    )
    for model, op, text in MODEL_CASES:
        if only not in f"{model} {op}" or (not cuda and model not in CPU_MODELS):
            continue
        for repeat in range(repeats):
            try:
                row = ring.race(op, text)
            except BaselineError as error:
                print(f"{model:14}{op:34} not timed: {error}")
                break
            low, high = row["speedup_low"], row["speedup_high"]
            found = {
                "model": model,
                "op": op,
                "us": row["aten_us"],
                "error": row["speedup"] - 1,
                "low": low,
                "high": high,
            }
            found |= {"rounds": row["rounds"], "seconds": row["seconds"], "notes": row["notes"], "row": row}
            beside = ""
            if cuda and repeat == 0:
                first, second, spent = do_bench(op, text, ring.device)
                found |= {"do_bench_us": first, "do_bench_error": first / second - 1, "do_bench_seconds": spent}
                beside = f"{first:14.2f}{100 * found['do_bench_error']:7.2f}{spent:7.2f}"
            rows.append(found)
            extra = "" if not cuda else f" {row['device']['method']} {row['device']['cache']} {row['device']['calls']}"
            interval = f"[{100 * (low - 1):.2f}, {100 * (high - 1):.2f}]"
            figures = (
                f"{row['aten_us']:9.2f}{100 * found['error']:11.3f}{interval:>18}{row['rounds']:7}{row['seconds']:7.3f}"
            )
            print(f"{model:14}{op:34}{figures}{beside}{extra}", flush=True)
    errors = [abs(r["error"]) for r in rows]
    covered = [r["low"] <= 1 <= r["high"] for r in rows]
    summary = {
        "cases": len({(r["model"], r["op"], r["us"]) for r in rows if "do_bench_us" in r}) or len(rows), "races": len(rows),
        "p50": quantile(errors, 0.5), "p90": quantile(errors, 0.9), "p99": quantile(errors, 0.99), "worst": max(errors),
        "covered": sum(covered) / len(covered), "seconds_p50": quantile([r["seconds"] for r in rows], 0.5),
        "seconds_p90": quantile([r["seconds"] for r in rows], 0.9),
        "seconds_p50_below_5us": quantile([r["seconds"] for r in rows if r["us"] < 5], 0.5),
        "half_width_p50": quantile([(r["high"] - r["low"]) / 2 for r in rows], 0.5),
    }  # fmt: skip
    beside = [abs(r["do_bench_error"]) for r in rows if "do_bench_error" in r]
    if beside:
        spent = [r["do_bench_seconds"] for r in rows if "do_bench_seconds" in r]
        summary["do_bench"] = {
            "p50": quantile(beside, 0.5),
            "p90": quantile(beside, 0.9),
            "p99": quantile(beside, 0.99),
            "worst": max(beside),
            "seconds_p50": quantile(spent, 0.5),
        }
    print(json.dumps(summary, indent=1))
    for whose, those in (("a race", rows), ("one below 5 µs", [r for r in rows if r["us"] < 5])):
        spent_in: Counter[str] = Counter()
        for r in those:
            spent_in.update({step: ms / len(those) for step, ms in r["row"]["ms"].items()})
        print(f"ms {whose} in:", ", ".join(f"{step} {ms:.1f}" for step, ms in spent_in.most_common()))
    return {"summary": summary, "rows": rows}


def known_ratios(ring: Ring, repeats: int) -> list[dict[str, Any]]:
    """Race a kernel against one that does the same twice; the ratio is 2 by construction."""
    rows = []
    print(f"\n{'kernel':30}{'once µs':>10}{'twice µs':>10}{'ratio':>9}{'interval':>20}{'do_bench':>10}")
    with tempfile.TemporaryDirectory() as folder:
        plans = [
            ("spin", SPIN, "neg.default", f"((T([{64 + n}], f32),), {{}})", {"ns": ns})
            for n, ns in enumerate((0, 1000, 3000, 10_000, 100_000, 1_000_000))
        ]
        plans += [
            ("touch", TOUCH, "add.Tensor", f"((T([{n}], f32), T([{n}], f32)), {{}})", {})
            for n in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
        ]
        for name, source, op, text, words in plans:
            files = []
            for times in (1, 2):
                file = Path(folder) / f"{name}-{words.get('ns', '')}-{times}.py"
                filled = source.replace("{times}", str(times)).replace("{ns}", str(words.get("ns", 0)))
                file.write_text(filled)
                files.append(str(file))
            beside = bench_files(op, text, files, ring.device)
            for _ in range(repeats):
                row = ring.race(op, text, (files[0], files[1]))
                interval = f"[{row['speedup_low']:.4f}, {row['speedup_high']:.4f}]"
                what = f"{name} {words.get('ns', '')}{'' if words else text.split('[')[1].split(']')[0]}"
                rows.append(
                    {
                        "kernel": what,
                        "ratio": row["speedup"],
                        "low": row["speedup_low"],
                        "high": row["speedup_high"],
                        "us": row["kernel_us"],
                        "do_bench": beside,
                        "device": row["device"],
                        "seconds": row["seconds"],
                    }
                )
                figures = (
                    f"{row['kernel_us']:10.3f}{row['aten_us']:10.3f}{row['speedup']:9.4f}{interval:>20}{beside:10.3f}"
                )
                allocated = f"{row['device']['cache']} {row['device']['calls']} {row['seconds']:.3f}s"
                print(f"{what:30}{figures}  {allocated}", flush=True)
    return rows


def bench_files(op: str, text: str, files: list[str], device: torch.device) -> float:
    """Return the ratio of two kernels by do_bench."""
    import importlib.util

    from triton.testing import do_bench as bench

    times = []
    for file in files:
        spec = importlib.util.spec_from_file_location("timed", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _, args, kwargs = arguments(op, text, device)
        function = getattr(module, f"{op.split('.', maxsplit=1)[0]}_kernel_impl")
        times.append(float(bench(lambda f=function, a=args, k=kwargs: f(*a, **k), return_mode="median")))
    return times[1] / times[0]


def known_time(ring: Ring) -> list[dict[str, Any]]:
    """Hold the device time of small kernels against the slope of graphs of two lengths, and against CUPTI's durations."""
    rows = []
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload(["torch"])
    print(f"\n{'operator':26}{'opforge µs':>12}{'slope µs':>10}{'off %':>8}{'CUPTI µs':>10}{'do_bench µs':>13}")
    for op, text in (
        ("neg.default", "((T([1024], f32),), {})"),
        ("add.Tensor", "((T([1, 1, 768], f16), T([1, 1, 768], f16)), {})"),
        ("relu.default", "((T([64, 64], f32),), {})"),
        ("mul.Tensor", "((T([1, 1, 4096], bf16), T([4096], bf16)), {})"),
        ("silu.default", "((T([1, 1, 14336], bf16),), {})"),
    ):
        row = ring.race(op, text)
        with fresh.Pool(1) as apart:  # a process that has captured nothing yet
            true_us, cupti_us = apart.apply(slope, (op, text, str(ring.device)))
        beside = do_bench(op, text, ring.device)[0]
        rows.append(
            {
                "op": op,
                "us": row["aten_us"],
                "slope_us": true_us,
                "cupti_us": cupti_us,
                "do_bench_us": beside,
                "device": row["device"],
            }
        )
        print(
            f"{op:26}{row['aten_us']:12.3f}{true_us:10.3f}{100 * (row['aten_us'] / true_us - 1):8.2f}{cupti_us:10.3f}{beside:13.3f}",
            flush=True,
        )
    return rows


def slope(op: str, text: str, device: str) -> tuple[float, float]:
    """Return µs per call from graphs of 32 and 96 calls over inputs of their own, and the kernel's duration by CUPTI."""
    made = [arguments(op, text, torch.device(device)) for _ in range(96)]
    graphs = []
    for count in (32, 96):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            made[0][0](*made[0][1], **made[0][2])
            torch.cuda.synchronize()
            graph.capture_begin()
            kept = [f(*a, **k) for f, a, k in made[:count]]
            graph.capture_end()
        graphs.append((graph, kept))
    found: list[list[float]] = [[], []]
    given = [t for _, args, _ in made for t in args if isinstance(t, torch.Tensor)]
    spare = [t.clone() for t in given]
    for _ in range(300):
        for (graph, _kept), times in zip(graphs, found, strict=True):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch._foreach_copy_(given, spare)  # inputs that were just written, as in a race
            torch.cuda._sleep(100_000)
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after))
    short, long = (statistics.median(times[20:]) for times in found)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for f, a, k in made:
            f(*a, **k)
        torch.cuda.synchronize()
    durations = [e.device_time for e in seen.events() if e.device_time > 0]
    return 1000 * (long - short) / 64, statistics.median(durations) if durations else float("nan")


@contextmanager
def loaded(busy: bool) -> Iterator[None]:
    """Keep every core busy with other processes, if asked."""
    others = [multiprocessing.Process(target=_burn, daemon=True) for _ in range((os.cpu_count() or 1) if busy else 0)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()


def _burn() -> None:
    while True:
        sum(range(100_000))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", default="aa,bias,known")
    parser.add_argument("--json", type=Path, help="write every figure to this file too")
    words = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(words.device) if words.device != "cpu" else f"{os.cpu_count()} cores"
    print(f"torch {torch.__version__}, {name}{', under load' if words.load else ''}")
    ring = Ring(words.device)
    found: dict[str, Any] = {}
    try:
        if "aa" in words.parts:
            with loaded(words.load):
                found["aa"] = against_itself(ring, words.repeats, words.only)
        if "bias" in words.parts and words.device != "cpu":
            found["bias"] = known_ratios(ring, words.repeats)
        if "known" in words.parts and words.device != "cpu":
            found["known"] = known_time(ring)
    finally:
        ring.close()
        if words.json:
            words.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
