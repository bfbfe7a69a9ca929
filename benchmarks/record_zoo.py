"""Record a suite of popular architectures: all of the zoo, inference and training, each in a process of its own.

    python benchmarks/record_zoo.py OUT.parquet --device cuda --workers 8 --minutes 9    # as it is shipped: on a GPU
    python benchmarks/record_zoo.py OUT.parquet --device cuda --workers 8 --resume       # goes on where that ended
    python benchmarks/record_zoo.py OUT.parquet --fake --only hf:BertForMaskedLM,timm:resnet50
    python benchmarks/record_zoo.py OUT.parquet --page docs/torchbench.md                # what is in a file, as a page

What each run records is kept in OUT.parquet.parts until the file is whole. A run that fails costs only itself, is named with
its reason, and gives what it did until then. It needs transformers, timm and torchvision.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from opforge.reports.trace_page import markdown
from opforge.traces import trace_file
from opforge.traces.parallel import Limits, Recording, forks_reach, preload
from opforge.traces.record import recording_metadata
from opforge.traces.recordings import Parts, RunEnd, TracedRun
from opforge.traces.targets import Settings
from opforge.traces.zoo import runs

_TO_PUT_TOGETHER_S = 30.0
"""What is left of --minutes for writing the file."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fake", action="store_true", help="tensors without contents: nothing is computed")
    parser.add_argument("--only", default="", help="names such as hf:BertForMaskedLM,timm:resnet50")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is ended")
    parser.add_argument("--minutes", type=float, help="end by then, with what there is")
    parser.add_argument("--resume", action="store_true", help="go on: runs that ended well are not run again")
    parser.add_argument("--no-fork", action="store_true", help="fresh processes, which import everything themselves")
    parser.add_argument("--page", type=Path, help="only say on this page what is in the file")
    options = parser.parse_args()
    if options.page is not None:
        options.page.write_text(markdown(trace_file.read_trace(options.out), options.out))
        return
    until = time.monotonic() + 60 * options.minutes - _TO_PUT_TOGETHER_S if options.minutes else float("inf")
    chosen = runs(options.device, fake=options.fake)
    wanted = set(filter(None, options.only.split(",")))
    if unknown := wanted - {name(run) for run in chosen}:
        parser.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    chosen = [run for run in chosen if not wanted or name(run) in wanted]
    folder = Path(f"{options.out}.parts")
    if not options.resume and folder.exists():
        shutil.rmtree(folder)
    parts = Parts(folder)
    record(parts, chosen, Limits(options.workers, options.limit, until), options)
    put_together(parts, chosen, options)


def name(run: TracedRun) -> str:
    return f"{run.target.kind}:{run.target.name}"


def record(parts: Parts, chosen: list[TracedRun], limits: Limits, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    fork = not options.no_fork
    if fork:
        preload(run.target.kind for run in chosen)
        fork = options.fake or forks_reach(options.device)
    if not fork and not options.fake:
        test = f"import torch; torch.zeros(1, device={options.device!r})"
        if subprocess.run([sys.executable, "-c", test], check=False).returncode:
            sys.exit(f"device {options.device} cannot be used: see above")
    print(f"{'forks' if fork else 'fresh processes'}, ready after {time.monotonic() - begun:.0f} s", flush=True)
    done = 0

    def say(run: TracedRun, ended: RunEnd) -> None:
        nonlocal done
        done += 1
        at = time.monotonic() - begun
        print(f"{at:4.0f} s {done}/{len(chosen)} {run.name}: {ended.seconds:.1f} s {ended.error}", flush=True)

    Recording(parts, limits, say, fork).record(sorted(chosen, key=_mixed))


def _mixed(run: TracedRun) -> int:
    """Return a place in an order in which large ones are not all run at the same time."""
    return sum((n + 1) * 2654435761 * ord(c) for n, c in enumerate(run.name)) % 1000003


def put_together(parts: Parts, chosen: list[TracedRun], options: argparse.Namespace) -> None:
    begun = time.monotonic()
    made = parts.merge(chosen, recording_metadata(Settings(options.device, options.fake), sys.argv))
    trace_file.write_trace(options.out, made)
    written = time.monotonic()
    trace_file.read_trace(options.out, all_columns=False)
    models, failed = made.metadata["models"], made.metadata["failed"]
    print(
        f"{len(models)} architectures, {made.operators} operators, {len(made.calls)} distinct calls, "
        f"{sum(c.count for c in made.calls)} calls, {options.out.stat().st_size / (1 << 20):.2f} MiB; "
        f"put together in {written - begun:.1f} s, read in {time.monotonic() - written:.2f} s"
    )
    print(f"{len(chosen) - len(failed)} of {len(chosen)} runs ended well; the others:")
    for what, why in sorted(failed.items()):
        print(f"  {what}: {why}")


if __name__ == "__main__":
    main()
