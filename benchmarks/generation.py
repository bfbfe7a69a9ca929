"""Kernels by language models against loopback servers: end to end, and many operators at once.

    python benchmarks/generation.py end-to-end [--device cuda] [--replayed] [--backends llm,kernel_agent] [--judges 2]
    python benchmarks/generation.py load [--operators 100] [--workers 4] [--rounds 2] [--delay 2.0] [--parallel 32] [--judges 2]

``end-to-end``: relu, add and softmax of OpInfo, by backend llm (wrong at first, right after feedback) and by kernel_agent with 6 workers and 15 rounds;
kernels in Triton, on a CPU in its interpreter, on a GPU compiled. ``load``: a slow server, many operators, several workers each; how busy asking and
judging were, and how memory went.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.generate.servers import AnthropicServer, OpenAIServer, Say, Seen  # noqa: E402

from opforge.generate.tasks import aten_tasks  # noqa: E402
from opforge.suites.base import LoadedSuite, SuiteOptions  # noqa: E402
from opforge.suites.opinfo.suite import OpInfoSuite  # noqa: E402

KERNELS = ROOT / "tests" / "generate" / "kernels"
ROAD = ("relu", "add", "softmax")
UNFINISHED = "```python\ndef {name}_kernel_impl(*args, **kwargs):\n    return args[0] * 3\n```\n"
KEY = "key-of-the-benchmark"


def reply(name: str, *, right: bool) -> str:
    if right and (KERNELS / f"{name}.py").exists():
        return f"```python\n{(KERNELS / f'{name}.py').read_text()}```\n"
    return UNFINISHED.format(name=name)


def start(words: list[str], out: Path, url: str = "") -> subprocess.Popen[bytes]:
    keys = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": url, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url}
    command = [sys.executable, "-m", "opforge.cli", "run", "--suite", "opinfo", "--dtypes", "f32", *words]
    return subprocess.Popen([*command, "--out", str(out)], env={**os.environ, **keys}, stdout=subprocess.DEVNULL)


def summary_of(out: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((out / "generation" / "summary.json").read_text())
    return row


def end_to_end(device: str, kinds: list[str], judges: int, *, replayed: bool) -> None:
    """Show that both backends come to right kernels, and in how long."""
    agent = ["--kernel-agent-workers", "6", "--kernel-agent-max-rounds", "15", "--parallel", "18"]
    for kind in kinds:
        words = ["--workers", str(judges), *(agent if kind == "kernel_agent" else [])]
        with tempfile.TemporaryDirectory() as folder, _answering(kind, Path(folder), replayed=replayed) as (more, url):
            begun = time.monotonic()
            ops = ["--ops", ",".join(ROAD), "--device", device, "--backend", kind]
            code = start([*ops, *words, *more], Path(folder) / "run", url).wait()
            row = summary_of(Path(folder) / "run")
            print(
                f"{kind} on {device}: exit code {code}, {row['right']} of {len(row['operators'])} kernels right, "
                f"{row['attempts']} attempts, {row['requests']} requests, {time.monotonic() - begun:.0f} s",
                flush=True,
            )


@contextmanager
def _answering(kind: str, folder: Path, *, replayed: bool) -> Iterator[tuple[list[str], str]]:
    """Yield the words and the address with which a run is answered: wrong at first; then right, of several workers the fourth."""

    def answer(seen: Seen) -> Say:
        task = next(m for m in seen.body["messages"] if m["role"] == "user")["content"]
        name = next(name for name in ROAD if f"{name}_kernel_impl" in task)
        right = len(seen.body["messages"]) > 2 and ("worker" not in task or "worker 4 of 6" in task)
        return Say(reply(name, right=right))

    if not replayed:
        with (AnthropicServer if kind == "llm" else OpenAIServer)(answer) as server:
            yield [], server.url
        return
    lines = []
    for name in ROAD:
        for worker in range(1, 7) if kind == "kernel_agent" else (0,):
            texts = [f"{name}_kernel_impl", *([f"worker {worker} of 6"] if worker else [])]
            replies = [reply(name, right=number > 0 and worker in (0, 4)) for number in range(15)]
            lines += [{"contains": texts, "reply": {"text": text}} for text in replies]
    transcript = folder / "transcript.jsonl"
    transcript.write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield ["--transcript", str(transcript)], ""


def load(arguments: argparse.Namespace) -> None:
    """Show how busy asking and judging are with many operators, and that memory stays flat."""
    names = smallest(arguments.operators)

    def answer(seen: Seen) -> Say:
        task = seen.body["messages"][1]["content"]
        name = task.split("_kernel_impl")[0].rpartition("`")[2]
        return Say(reply(name, right="worker 3" in task), delay_s=arguments.delay)

    words = [
        "--ops", ",".join(names), "--backend", "kernel_agent", "--dsl", "pytorch", "--timeout", "20",
        "--kernel-agent-workers", str(arguments.workers), "--kernel-agent-max-rounds", str(arguments.rounds),
        "--parallel", str(arguments.parallel), "--workers", str(arguments.judges),
    ]  # fmt: skip
    with OpenAIServer(answer) as server, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        process = start(words, out, server.url)
        sizes = watch(process, out)
        row = summary_of(out)
        asked, judged = row["asking_seconds"], row["judging_seconds"]
        print(
            f"{len(row['operators'])} operators × {arguments.workers} workers × {arguments.rounds} rounds, a reply takes {arguments.delay:g} s, "
            f"{arguments.parallel} workers active, {arguments.judges} judges, {os.cpu_count()} cores"
        )
        print(
            f"{row['requests']} requests, {row['attempts']} attempts judged, in {row['seconds']:.0f} s; at most {server.busy_most} requests open"
        )
        print(f"asking:  {asked:.0f} s in all, {asked / row['seconds']:.1f} requests open on average")
        print(
            f"judging: {judged:.0f} s in all, judges busy {judged / row['seconds'] / arguments.judges:.0%} of the time"
        )
        apart = asked / arguments.parallel + judged / arguments.judges
        print(f"first all asking, {arguments.parallel} at once, and then all judging would have been {apart:.0f} s")
        quarter = max(1, len(sizes) // 4)
        early, late = statistics.median(sizes[quarter : 2 * quarter] or sizes), statistics.median(sizes[-quarter:])
        print(
            f"memory of the main process: {early:.0f} MiB in the second quarter, {late:.0f} MiB in the last, {max(sizes):.0f} MiB at most"
        )


def smallest(count: int) -> list[str]:
    """Return the packets of the suite with the fewest cases, those with kernels in this repository first."""
    suite: LoadedSuite = OpInfoSuite().load(SuiteOptions("cpu", ("f32",)))
    tasks = sorted(aten_tasks(suite), key=lambda task: sum(len(part.cases) for part in task.parts))
    names = [task.name for task in tasks if "_backward" not in task.name and not task.name.startswith("_")]
    return list(dict.fromkeys(["relu", *names]))[:count]


def watch(process: subprocess.Popen[bytes], out: Path) -> list[float]:
    """Return the memory of a process, in MiB, once a second while kernels are made."""
    sizes = []
    while process.poll() is None:
        if (out / "generation" / "requests.jsonl").exists() and not (out / "generation" / "summary.json").exists():
            sizes.append(psutil.Process(process.pid).memory_info().rss / 2**20)
        time.sleep(1)
    return sizes or [0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("end-to-end", "load"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--replayed", action="store_true", help="end-to-end: by transcripts, which need no SDK")
    parser.add_argument("--backends", default="llm,kernel_agent", help="end-to-end: which, in which order")
    parser.add_argument("--operators", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--delay", type=float, default=2.0)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--judges", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "end-to-end":
        end_to_end(arguments.device, arguments.backends.split(","), arguments.judges, replayed=arguments.replayed)
    else:
        load(arguments)


if __name__ == "__main__":
    main()
