"""How much two runs of the same kernels differ, and what `opforge compare` makes of it.

    python benchmarks/compare_noise.py [--repeats 20] [--keep DIR]      # makes two runs a repeat, then compares them
    python benchmarks/compare_noise.py --again DIR                      # compares runs that were kept

A repeat is two runs on the CPU: one of example kernels, and one of the same with a regression planted in one of them (it
does its work twice). Held against each other, the two must name that one and nothing else. The runs without a
regression, each held against the next, must name nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from opforge.runs import RunConfig, run

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


def write_kernels(folder: Path, planted: str = "") -> Path:
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
        file.write_text(file.read_text() + PLANT.format(name=planted))
    return folder


def make_runs(repeats: int, folder: Path) -> None:
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
                    str(log), "directory", ops_directory=str(write_kernels(Path(kernels) / "k", name)), workers=1
                )
                ended = run(config, out)
            wrong = [t.op for t in ended.summary.judged if not t.right]
            sys.stderr.write(f"{out.name} {name} {ended.summary.speed} not right: {wrong}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    make_runs(options.repeats, options.keep)


if __name__ == "__main__":
    main()
