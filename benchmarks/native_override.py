"""What a call costs that a slot in C++ passes on or serves, against ATen's own call and against the same through Python.

All ways take turns in every round; the figures are medians over the rounds of the ratio and of the difference to ATen's call
in the same round: what drifts between rounds cancels out. Times are those of the thread, without what other processes take.

    python benchmarks/native_override.py [--rounds 60 --calls 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

import opforge
from opforge.backends.directory import kernel_from_file
from opforge.kernels.proof import proof_path
from opforge.runtime.devices import device_name
from opforge.runtime.enabling import NATIVE_VARIABLE
from opforge.runtime.proof_files import PROOF_FORMAT, sign_proof
from opforge.runtime.signing import load_or_create_key

PYTHON = {
    "relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.clamp(self, min=0)\n",
    "add": "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n    return torch.sub(self, other, alpha=-alpha)\n",
}
CPP = """
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>
static at::Tensor made(const at::Tensor& self) { return at::detail::empty_cpu(self.sizes(), at::kFloat); }
static at::Tensor relu(const at::Tensor& self) {
  at::Tensor result = made(self);
  const float* from = self.const_data_ptr<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0, count = self.numel(); i < count; ++i) to[i] = from[i] < 0 ? 0 : from[i];
  return result;
}
static at::Tensor add(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  at::Tensor result = made(self);
  const float *one = self.const_data_ptr<float>(), *two = other.const_data_ptr<float>(), by = alpha.to<float>();
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0, count = self.numel(); i < count; ++i) to[i] = one[i] + by * two[i];
  return result;
}
TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def(SCHEMA, &OP); }
"""
SCHEMAS = {"relu": "relu(Tensor self) -> Tensor", "add": "add(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"}
CALLED = {
    "relu": torch.relu, "add": torch.add, "mul": torch.mul, "gelu": torch.nn.functional.gelu,
    "_softmax": partial(torch.softmax, dim=-1), "mm": torch.mm, "sum": torch.sum, "clamp": partial(torch.clamp, min=0), "cumsum": partial(torch.cumsum, dim=1),
    "native_layer_norm": lambda x, weight, bias: torch.native_layer_norm(x, [16], weight[0], bias[0], 1e-5),
}  # fmt: skip
"""Calls of the operators. The slots of sum and cumsum take boxed arguments."""
SIGNATURES = {
    "add": "float32,float32",
    "mul": "float32,float32",
    "mm": "float32,float32",
    "native_layer_norm": "float32,float32,float32",
}
PROVEN, NOT_PROVEN = 1 << 20, 4
Way = Callable[[], AbstractContextManager[object]]


def write(root: Path, op: str, source: str, suffix: str, most: int) -> Path:
    """Write a kernel with a proof for tensors of up to some size; return its folder."""
    folder = root / op
    folder.mkdir(parents=True)
    file = folder / f"{op}_implementation_1{suffix}"
    file.write_text(source)
    kernel = kernel_from_file(file, op)
    extents = [[[1, most]] * 4] * len(SIGNATURES.get(op, "float32").split(","))
    row = {
        "rank": [0, 4],
        "numel": [1, most],
        "extents": extents,
        "layouts": ["contiguous"],
        "timed": [[1, most, True]],
    }
    proof = {"digest": kernel.digest, "torch": torch.__version__, "device": device_name("cpu")}
    about = {
        "opforge_proof": PROOF_FORMAT,
        "suites": [],
        "operators": {kernel.primary: {SIGNATURES.get(op, "float32"): row}},
    }
    proof_path(file).write_text(json.dumps(sign_proof(load_or_create_key(), {**proof, **about})))
    return root


@contextmanager
def enabled(root: Path, op: str, *, native: bool) -> Iterator[None]:
    os.environ[NATIVE_VARIABLE] = str(int(native))
    with opforge.enabled(root, device="cpu", ops=[op]):
        yield


def ways(op: str, root: Path) -> dict[str, Way]:
    never_called = f"def {op}_kernel_impl(*_args, **_kwargs):\n    raise NotImplementedError\n"
    unproven = write(root / "unproven", op, never_called, ".py", NOT_PROVEN)
    passed_on: dict[str, Way] = {
        "ATen": nullcontext,
        "ATen again": nullcontext,
        "passed on, native": partial(enabled, unproven, op, native=True),
        "passed on, through Python": partial(enabled, unproven, op, native=False),
    }
    if op not in SCHEMAS:
        return passed_on
    cpp = CPP.replace("SCHEMA", f'"{SCHEMAS[op]}"').replace("&OP", f"&{op}")
    python = write(root / "python", op, PYTHON[op], ".py", PROVEN)
    native = write(root / "cpp", op, cpp, ".cpp", PROVEN)
    return passed_on | {
        "C++ kernel, native": partial(enabled, native, op, native=True),
        "C++ kernel, through Python": partial(enabled, native, op, native=False),
        "Python kernel, native": partial(enabled, python, op, native=True),
        "Python kernel, through Python": partial(enabled, python, op, native=False),
    }


def measure(call: Callable[[], object], found: dict[str, Way], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return the thread's times of a call in every round by way, µs."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, way in found.items():
            with way():
                for _ in range(50):
                    call()
                began = time.thread_time()
                for _ in range(calls):
                    call()
                times[name].append((time.thread_time() - began) / calls * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{device_name('cpu')}, torch {torch.__version__}; medians over {given.rounds} rounds of {given.calls} calls")
    for op, function in CALLED.items():
        tensors = [torch.randn(16, 16) for _ in SIGNATURES.get(op, "float32").split(",")]
        with tempfile.TemporaryDirectory() as folder:
            times = measure(partial(function, *tensors), ways(op, Path(folder)), given.rounds, given.calls)
        aten = times["ATen"]
        for name, found in times.items():
            ratio = statistics.median(one / base for one, base in zip(found, aten, strict=True))
            more = statistics.median(one - base for one, base in zip(found, aten, strict=True))
            print(f"{op:5} {name:30} {statistics.median(found):7.2f} µs   {ratio:5.2f} × ATen   {more:+6.2f} µs")


if __name__ == "__main__":
    main()
