"""What each step to the ExecuTorch runtime costs, and how large library and runner are with and without selection.

    python benchmarks/edge.py [--ops 6] [--repeats 3]

A folder of operators is made as `opforge edge init` makes it, in a place of its own with a cache of its own; a model uses one of them.
Every step is timed with the processes that it starts, by the clock and by the time on cores; what is built is built anew each time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ONE = """
import ops
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.my_ops.mul0(x)

def model():
    return Model()

def inputs():
    return (torch.linspace(-2, 2, 4096).reshape(64, 64),)
"""
RUNS = 2000
T = TypeVar("T")


def cpu_seconds() -> float:
    """Return the time that this process and those that it has started were on a core, which other work here does not change much."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def timed(name: str, repeats: int, step: Callable[[], T]) -> T:
    """Print how long a step takes, and return what came of it."""
    from opforge.edge.child import FORKING_PROCESS

    seconds, work = [], []
    for _ in range(repeats):
        shutil.rmtree(os.environ["OPFORGE_CACHE"] + "/edge", ignore_errors=True)
        start, busy = time.perf_counter(), cpu_seconds()
        result = step()
        FORKING_PROCESS.end()  # each step by itself: its imports count
        seconds.append(time.perf_counter() - start)
        work.append(cpu_seconds() - busy)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(
        f"{name:48} {statistics.median(work):8.2f} s {statistics.median(seconds):8.2f} s   (n={repeats}, {spread})",
        flush=True,
    )
    return result


def steps(place: Path, count: int, repeats: int) -> None:
    from opforge.edge import bindings, build, runner
    from opforge.edge.export import export_model, parse_target
    from opforge.edge.init import make_folder
    from opforge.edge.run import ProgramJob, run_program
    from opforge.edge.toolchain import BuildOptions

    path, program = place / "ops", place / "one.pte"
    make_folder(path, "my_ops", [f"mul{number}" for number in range(count)])
    (path / "one.py").write_text(ONE)
    target = parse_target(str(path / "one.py"))
    timed("export, a process of its own", repeats, lambda: export_model(target, program))
    timed("open the folder, read its bindings", repeats, lambda: build.read_folder(path))
    folder = build.read_folder(path)
    timed("select what a program needs", repeats, lambda: bindings.select_for_model(folder.entries, program))
    whole, part = bindings.select_all(folder.entries), bindings.select_for_model(folder.entries, program)
    for name, chosen in ((f"{count} operators", whole), ("1 operator", part)):
        timed(
            f"generate, {name}",
            repeats,
            lambda c=chosen: build.generate_registration(folder.bindings_file, c, place / "generated"),
        )
    made_by = {
        tool: timed(
            f"generate, compile a library, {tool}, 1 of {count}",
            repeats,
            lambda t=tool: build.build(folder, part, place / t, BuildOptions(t)),
        )
        for tool in ("direct", "cmake")
    }
    small = made_by["direct"]
    large = build.build(folder, whole, place / "whole")
    timed(
        "run on the library, processes of their own",
        repeats,
        lambda: run_program(ProgramJob(program, (small.library,))),
    )
    beside = runner.RunnerOptions(copy_libraries=True)
    one = timed(
        f"generate, compile the runner, 1 of {count}",
        repeats,
        lambda: runner.build_runner(folder, part, place / "one" / "runner", beside),
    )
    all_ = runner.build_runner(folder, whole, place / "all" / "runner", beside)
    data = place / "input.bin"
    data.write_bytes(bytes(4 * 64 * 64))
    command = [one.path, program, data]
    timed("start the runner, load, run once", repeats, lambda: subprocess.run(command, capture_output=True, check=True))
    said = subprocess.run([*command, "--repeat", str(RUNS)], capture_output=True, text=True, check=True).stdout
    print(f"in the runner, 4096 elements: {said.splitlines()[-1]}")
    sizes(
        [
            (f"library, {count} operators", large.bytes, None),
            ("library, 1 operator", small.bytes, large.bytes),
            (f"runner, {count} operators", all_.bytes, None),
            ("runner, 1 operator", one.bytes, all_.bytes),
            ("libexecutorch.so, which a runner needs", one.library_bytes, None),
            ("libexecutorch_kernels_optimized.so, with --aten", size_of(runner.ATEN_LIBRARY), None),
        ]
    )


def size_of(library: str) -> int:
    from opforge.edge import toolchain

    return (toolchain.find_executorch().library_folder / f"lib{library}.so").stat().st_size


def sizes(rows: list[tuple[str, int, int | None]]) -> None:
    for name, size, before in rows:
        share = f"   {100 * size / before:.0f} % of that with all" if before else ""
        print(f"{name:48} {size:10,} bytes{share}")


def ahead(place: Path, repeats: int) -> None:
    """Time the library that registers an operator ahead of time, in C++."""
    from opforge.kernels import native

    folder = Path(__file__).resolve().parents[1] / "examples" / "edge" / "mul4" / "aot"

    def build(number: int = 0) -> None:
        copy = place / f"aot{time.time_ns()}{number}"
        shutil.copytree(folder, copy)
        (copy / "mul4.cpp").write_text(f"// {time.time_ns()}\n" + (copy / "mul4.cpp").read_text())
        native.build(native.LibrarySpec("mul4", (copy / "mul4.cpp",), copy))

    timed("build a C++ registration (stable ABI)", repeats, build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opforge-edge-") as name:
        os.environ["OPFORGE_CACHE"] = f"{name}/cache"
        from opforge.edge import toolchain
        from opforge.kernels.native.toolchain import cxx, torch_build

        print(
            f"executorch {toolchain.find_executorch().version}, torch {torch_build().version}, {cxx().version}, {platform.machine()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}",
            flush=True,
        )
        print(f"{'step':48} {'on cores':>10} {'by the clock':>12}")
        ahead(Path(name), options.repeats)
        steps(Path(name), options.ops, options.repeats)


if __name__ == "__main__":
    main()
