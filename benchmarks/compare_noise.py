"""How much two runs of the same kernels differ, and what `opforge compare` makes of it.

    python benchmarks/compare_noise.py [--repeats 20] [--times 4] [--keep DIR]    # makes two runs a repeat, then compares them
    python benchmarks/compare_noise.py --again DIR                      # compares runs that were kept

A repeat is two runs on the CPU: one of example kernels, and one of the same with a regression planted in one of them (it
does its work four times). Held against each other, the two must name that one and nothing else. The runs without a
regression, each compared with the next, must name nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from opforge.runs import RunConfig, run
from opforge.runs.compare.comparison import ChangeKind, RunData, compare, same_source, speed_changes
from opforge.runs.compare.compatible import device_name
from opforge.runs.store import read_manifest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("_softmax", "_log_softmax", "add", "mul")
"""Taken from examples/model_kernels; the others are these, each about as fast as ATen."""
KERNELS = {
    "relu": "self.clamp_min(0)",
    "abs": "torch.copysign(self, torch.ones((), dtype=self.dtype))",
    "neg": "self * -1",
    "square": "self * self",
    "sub": "self + (-other if alpha == 1 else other * -alpha)",
}
PLANTED = ("relu", "square", "_softmax", "abs", "_log_softmax")
"""Each repeat slows down the next of these."""
PLANT = """

_original = {name}_kernel_impl


def {name}_kernel_impl(self, *others):
    for _ in range({times} - 1):
        _original(self, *others)
    return _original(self, *others)
"""
UNARY, BINARY = "((T([{}, 256], f32),), {{}})", "((T([{}, 256], f32), T([256], f32)), {{}})"
CALLS = {
    **dict.fromkeys(("relu.default", "abs.default", "neg.default", "square.default"), UNARY),
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "mul.Tensor"), BINARY),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default"), "((T([{}, 256], f32), -1, False), {{}})"),
}
ROWS = (128, 512)


def write_kernels(folder: Path, planted: str, times: int) -> Path:
    """Return a folder of the kernels, one of them slowed down if asked for."""
    for name in EXAMPLES:
        shutil.copytree(ROOT / "examples/model_kernels" / name, folder / name, ignore=shutil.ignore_patterns("__*"))
    for name, result in KERNELS.items():
        (folder / name).mkdir(parents=True)
        more = ", other, *, alpha=1" if name == "sub" else ""
        source = f"import torch\n\n\ndef {name}_kernel_impl(self{more}):\n    return {result}\n"
        (folder / name / f"{name}_implementation_1.py").write_text(source)
    if planted:
        file = folder / planted / f"{planted}_implementation_1.py"
        file.write_text(file.read_text() + PLANT.format(name=planted, times=times))
    return folder


def make_runs(repeats: int, folder: Path, times: int) -> None:
    """Make the runs of all repeats that are not there yet; which of the two comes first changes from one to the next."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "calls.txt"
    lines = [
        f"Operator: aten.{op}\n" + "".join(f"cnt: 1, {case.format(n)}\n" for n in ROWS) for op, case in CALLS.items()
    ]
    log.write_text("".join(lines))
    for repeat in range(repeats):
        planted = PLANTED[repeat % len(PLANTED)]
        kinds = [("before", ""), ("after", planted)]
        for kind, name in kinds if repeat % 2 else kinds[::-1]:
            out = folder / f"{repeat:02}-{kind}"
            if out.exists():
                continue
            with tempfile.TemporaryDirectory() as kernels:
                config = RunConfig(
                    str(log), "directory", ops_directory=str(write_kernels(Path(kernels) / "k", name, times)), workers=1
                )
                ended = run(config, out)
            wrong = [t.op for t in ended.summary.judged if not t.is_correct]
            sys.stderr.write(f"{out.name} {name} {ended.summary.speed} not right: {wrong}\n")


def planted_table(folder: Path) -> list[str]:
    """Return what the comparison of each repeat says."""
    lines = [
        "repeat  planted        change of speed         named slower or faster    other differences            noise"
    ]
    found, strangers, alone = 0, 0, 0
    ended = Counter(p.name.partition("-")[0] for p in folder.glob("*-*") if _finished(p))
    repeats = sorted(number for number, runs in ended.items() if runs == 2)
    for number in repeats:
        comparison = compare(folder / f"{number}-before", folder / f"{number}-after")
        planted = PLANTED[int(number) % len(PLANTED)] + ".default"
        speedy = [d for d in comparison.differences if d.kind in (ChangeKind.SLOWER, ChangeKind.FASTER)]
        named = [f"{d.unit} {d.kind}" for d in speedy]
        others = [
            f"{d.unit} {d.kind}: {d.reasons[0][1][:60] if d.reasons else ''}"
            for d in comparison.differences
            if d not in speedy
        ]
        ratio = next((d.speeds.change for d in speedy if d.unit == planted), None)
        change = "" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        noise = comparison.noise["operators"].deviation * 100
        lines.append(
            f"{number:7} {planted.removesuffix('.default'):14} {change:23} {', '.join(named):25} {'; '.join(others):28} {noise:.1f} %"
        )
        found += f"{planted} slower" in named
        strangers += any(not name.startswith(planted) for name in named)
        alone += named == [f"{planted} slower"] and not others
    of = f"of {len(repeats)}"
    lines += [
        f"planted regression named as slower: {found} {of}",
        f"another operator named as slower or faster: {strangers} {of}",
        f"the planted one named as slower and no difference besides, verdicts included: {alone} {of}",
    ]
    return lines


def noise_table(folder: Path) -> list[str]:
    """Return how much runs of the same kernels differ, and how often one of them would be named had its source changed."""
    runs = [RunData.read(p) for p in sorted(folder.glob("*-before")) if _finished(p)]
    pairs = {
        "each with the next": list(itertools.pairwise(runs)),
        "each with each": list(itertools.combinations(runs, 2)),
    }
    lines = []
    for title, some in pairs.items():
        noise, moved, asked, named = [], [], 0, []
        for one, other in some:
            same = same_source(one.manifest, other.manifest)
            whole = speed_changes(one, other, same, report_unchanged=False)
            noise.append(whole.noise["operators"].deviation)
            moved.append(abs(math.log(whole.largest_control_change[1].value)) if whole.largest_control_change else 0.0)
            for op in sorted(same):
                speeds = speed_changes(one, other, same - {op}, report_unchanged=False).speeds.get(op)
                asked += speeds is not None
                named += [op] if speeds is not None and (speeds.surely_slower or speeds.surely_faster) else []
        lines += [
            f"{title}: {len(some)} pairs of runs without a regression",
            f"  noise between two runs, as learnt: median {_percent(statistics.median(noise))}, most {_percent(max(noise))}",
            f"  largest change of any operator: median {_percent(statistics.median(moved))}, most {_percent(max(moved))}",
            f"  taken for edited, one operator at a time: {len(named)} of {asked} named ({_percent(len(named) / asked)}) "
            + ", ".join(f"{op} {count}×" for op, count in Counter(named).items()),
        ]
    return lines


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _finished(path: Path) -> bool:
    return read_manifest(path).finished is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--times", type=int, default=4, help="how often the slower kernel does its work")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which are removed otherwise")
    parser.add_argument("--again", type=Path, help="a folder of runs that were kept: nothing is run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.again or options.keep or Path(temporary)
        if options.again is None:
            make_runs(options.repeats, folder, options.times)
        first = read_manifest(next(iter(sorted(folder.glob("*-before")))))
        print(f"torch {first.versions['torch']}, {device_name(first)}, {os.cpu_count()} cores")
        print("\n".join([*noise_table(folder), "", *planted_table(folder)]))


if __name__ == "__main__":
    main()
