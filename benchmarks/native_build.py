"""What it costs to build a C++ kernel: cold with the stable ABI and with torch's full headers, cached, and twice at once.

    python benchmarks/native_build.py [--repeats 3]

Everything is built into a cache of its own, which is removed afterwards.
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
from pathlib import Path

BODY = {
    "stable ABI": """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor twice(const Tensor& self) {
  Tensor input = torch::stable::contiguous(self), result = torch::stable::empty_like(input);
  const float* from = static_cast<const float*>(input.const_data_ptr());
  float* to = static_cast<float*>(result.mutable_data_ptr());
  const int64_t count = input.numel();
  for (int64_t i = 0; i < count; ++i) to[i] = 2 * from[i];
  return result;
}
STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("twice(Tensor self) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) { m.impl("twice", TORCH_BOX(&twice)); }
""",
    "torch/library.h": """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
HERE
""",
    "torch/extension.h": """
#include <torch/extension.h>
HERE
""",
}
FULL = """
at::Tensor twice(const at::Tensor& self) {
  at::Tensor input = self.contiguous(), result = at::empty_like(input);
  const float* from = input.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  const int64_t count = input.numel();
  for (int64_t i = 0; i < count; ++i) to[i] = 2 * from[i];
  return result;
}
TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("twice(Tensor self) -> Tensor", &twice); }
"""
LOAD = """
import sys, time
from pathlib import Path
import torch
from opforge.kernels import native
start = time.perf_counter()
built = native.build(native.LibrarySpec.of_file(Path(sys.argv[1])))
found = time.perf_counter()
native.load(built.library)
loaded = time.perf_counter()
operator = getattr(torch.ops, built.name).twice
assert built.cached and torch.equal(operator(torch.ones(3)), torch.full((3,), 2.0))
print((found - start) * 1e3, (loaded - found) * 1e3)
"""
BUILD = """
import sys, time
from pathlib import Path
from opforge.kernels import native
start = time.perf_counter()
built = native.build(native.LibrarySpec.of_file(Path(sys.argv[1])))
print(int(built.cached), time.perf_counter() - start)
"""


def source(kind: str, mark: int) -> str:
    """Return a source that nobody has built yet."""
    return f"// {mark}\n" + BODY[kind].replace("HERE", FULL)


def python(code: str, *words: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def cold(folder: Path, repeats: int) -> dict[str, Path]:
    files = {}
    for number, kind in enumerate(BODY):
        seconds = []
        for repeat in range(repeats if kind != "torch/extension.h" else 1):
            files[kind] = folder / f"kind_{number}_{repeat}" / f"kind_{number}_{repeat}.cpp"
            files[kind].parent.mkdir()
            files[kind].write_text(source(kind, time.time_ns()))
            cached, took = python(BUILD, str(files[kind]))
            assert not cached
            seconds.append(took)
        print(
            f"cold   {kind:18} {statistics.median(seconds):6.2f} s   (n={len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f})",
            flush=True,
        )
    return files


def cached(files: dict[str, Path], repeats: int) -> None:
    for kind, file in files.items():
        python(
            LOAD, str(file)
        )  # the first look at a library is in a process of its own, and takes as long as importing torch
        rows = [python(LOAD, str(file)) for _ in range(repeats)]
        finding, loading = (statistics.median(column) for column in zip(*rows, strict=True))
        whole = [sum(row) for row in rows]
        print(
            f"cached {kind:18} {statistics.median(whole):6.1f} ms  (n={len(rows)}, {min(whole):.1f} to {max(whole):.1f}): "
            f"found in {finding:.1f} ms, checked for clashes and loaded in {loading:.1f} ms",
            flush=True,
        )


def at_once(folder: Path, count: int) -> None:
    log = folder / "calls"
    log.touch()
    wrapper = folder / "counting-c++"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {log}\nexec {shutil.which("c++")} "$@"\n')
    wrapper.chmod(0o755)
    file = folder / "twice_at_once" / "twice_at_once.cpp"
    file.parent.mkdir()
    file.write_text(source("stable ABI", time.time_ns()))
    environment = {**os.environ, "CXX": str(wrapper)}
    words = [sys.executable, "-c", BUILD, str(file)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    answers = [process.communicate()[0].split() for process in running]
    built = sum(answer[0] == "0" for answer in answers)
    compiled = len(log.read_text().split())
    print(
        f"at once  {count} processes build one source: {built} built it, {count - built} took its library; {compiled} calls of the compiler (compile, link)"
    )
    assert (built, compiled) == (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory(prefix="opforge-native-") as name:
        os.environ["OPFORGE_CACHE"] = f"{name}/cache"
        from opforge.kernels.native import toolchain

        facts = toolchain.torch_build()
        print(
            f"torch {facts.version}, {toolchain.cxx().version}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )
        files = cold(Path(name), repeats)
        cached(files, max(5, repeats))
        at_once(Path(name), 2)
        at_once_again = Path(name) / "four"
        at_once_again.mkdir()
        at_once(at_once_again, 4)


if __name__ == "__main__":
    main()
