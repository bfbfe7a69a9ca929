"""Record a suite of popular architectures: all of the zoo, inference and training, each in a process of its own.

    python benchmarks/record_zoo.py OUT.parquet --device cuda     # as it is shipped: on a GPU
    python benchmarks/record_zoo.py OUT.parquet --fake --only hf:BertForMaskedLM,timm:resnet50

Architectures that fail are named with their reasons, and what they did until then is kept. It needs transformers, timm and
torchvision.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from opforge.traces.collect import Collector
from opforge.traces.conduct import about, trace
from opforge.traces.file import write
from opforge.traces.targets import Settings
from opforge.traces.zoo import Architecture, architectures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fake", action="store_true", help="tensors without contents: nothing is computed")
    parser.add_argument("--only", default="", help="names such as hf:BertForMaskedLM,timm:resnet50")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds without a new call after which a model is ended"
    )
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    chosen = [a for a in architectures() if not wanted or _name(a) in wanted]
    if unknown := wanted - {_name(a) for a in chosen}:
        parser.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    collector, failed = Collector(), []
    for number, architecture in enumerate(chosen, 1):
        for name, settings in architecture.runs(options.device, fake=options.fake):
            begun = time.monotonic()
            try:
                ended = trace(collector, architecture.target, settings, lambda *_: None, options.limit).error
            except Exception as error:
                ended = str(error)
            took = time.monotonic() - begun
            print(f"{number}/{len(chosen)} {_name(architecture)} {name}: {took:.0f} s {ended}", flush=True)
            if ended:
                failed.append(f"{_name(architecture)} {name}: {ended}")
    made = collector.trace({**about(Settings(options.device, options.fake), sys.argv), "failed": failed})
    models = made.about["models"] = sorted({seen.model for call in made.calls for seen in call.seen})
    write(options.out, made)
    print(
        f"{len(models)} architectures, {made.operators} operators, {len(made.calls)} distinct calls, {options.out.stat().st_size >> 10} KiB"
    )
    print(f"{len(failed)} runs failed", *failed, sep="\n  ")


def _name(architecture: Architecture) -> str:
    return f"{architecture.target.kind}:{architecture.target.name}"


if __name__ == "__main__":
    main()
