"""What a call costs with a kernel in ATen's place, by the way the kernel is put there: 20 operators, small and large tensors.

Each way takes turns with ATen. The figures are medians over the rounds of the difference to ATen's call in the same
round: what drifts between rounds cancels out. On a GPU the kernels are in Triton, those of examples/triton_kernels and
simple ones written here, and "native" replays their launch plans; on a CPU they are in C++, where an operator has one.

    python benchmarks/override.py [--device cuda] [--flag-gems] [--ops relu,add] [--rounds 16 --calls 300]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from taking_turns import pair
from torch.nn import functional

import opforge
from opforge.backends.directory import kernel_from_file
from opforge.kernels.proof import proof_path
from opforge.runtime.devices import device_name
from opforge.runtime.enabling import NATIVE_VARIABLE
from opforge.runtime.layouts import SHAPES_DIFFER
from opforge.runtime.loading import load_function
from opforge.runtime.proof_files import PROOF_FORMAT, sign_proof
from opforge.runtime.signing import load_or_create_key

TRITON = Path(__file__).parents[1] / "examples" / "triton_kernels"
POINTWISE = {
    "relu": ("x", "", "x < 0 ? 0 : x"),
    "neg": ("x", "-x", "-x"),
    "abs": ("x", "tl.abs(x)", "std::fabs(x)"),
    "exp": ("x", "tl.exp(x)", "std::exp(x)"),
    "rsqrt": ("x", "tl.rsqrt(x)", "1 / std::sqrt(x)"),
    "div": ("xy", "x / y", "x / y"),
    "maximum": ("xy", "tl.maximum(x, y, tl.PropagateNan.ALL)", "((x > y) | (x != x)) ? x : y"),
    "minimum": ("xy", "tl.minimum(x, y, tl.PropagateNan.ALL)", "((x < y) | (x != x)) ? x : y"),
}
"""Inputs of simple kernels, and what these compute in Triton and in C++."""
TRITON_TEXT = """
import torch, triton
import triton.language as tl
@triton.jit
def compute({pointers}, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
{loads}
    tl.store(target + at, {value}, mask=inside)
def {op}_kernel_impl({names}):
    target = torch.empty_like({first})
    count = target.numel()
    compute[(triton.cdiv(count, 1024),)]({names}, target, count, BLOCK=1024)
    return target
"""
CPP_TEXT = """
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>
#include <cmath>
static at::Tensor compute({parameters}) {{
  at::Tensor result = at::detail::empty_cpu({first}.sizes(), at::kFloat);
  {pointers}
  float* to = result.mutable_data_ptr<float>();
  for (int64_t i = 0, count = result.numel(); i < count; ++i) {{ {loads} to[i] = {value}; }}
  return result;
}}
TORCH_LIBRARY(OPFORGE_NAMESPACE, m) {{ m.def("{op}({tensors}) -> Tensor", &compute); }}
"""
DECLINES = "def {op}_kernel_impl(*_args, **_kwargs):\n    raise NotImplementedError\n"
SIZES = {
    "cpu": {"small": (16, 16, 16), "large": (128, 256, 64)},
    "cuda": {"small": (32, 128, 256), "large": (8192, 4096, 4096)},
}
"""Rows and columns of most operators, and the side of matrices."""
PROVEN, NOT_PROVEN = 1 << 26, 2
SLOW_ROUNDS = 3
"""Rounds of ways that go through Python: they cost so much more that a few are enough."""
NATIVE_WAYS = ("passed on", "served")
Way = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Operator:
    """An operator's call, and what a proof says about it."""

    name: str
    overload: str
    call: Callable[[], Any]
    signature: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.name.partition(" ")[0]


def operators(device: str, rows: int, columns: int, side: int) -> list[Operator]:
    dtype = torch.float16 if device == "cuda" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device).add_(0.5).to(dtype)

    a, b, weight, matrix = random(rows, columns), random(rows, columns), random(columns), random(side, side)
    batch = random(4, side // 4, side // 4)
    one, two, three = (",".join([str(dtype).removeprefix("torch.")] * n) for n in (1, 2, 3))
    softmax = {"dim": {"int": [-1, 1]}, "half_to_float": {"False": []}}
    norm = {"normalized_shape": {"[int]*1": [1, 1 << 20]}, "eps": {"float": [1e-5, 1e-5]}}
    aten = torch.ops.aten
    return [
        *(Operator(op, "default", partial(getattr(torch, op), a), one) for op in ("relu", "neg", "abs", "exp")),
        Operator("rsqrt", "default", partial(torch.rsqrt, a), one),
        Operator("sigmoid", "default", partial(torch.sigmoid, a), one),
        Operator("gelu", "default", partial(functional.gelu, a), one),
        Operator("silu", "default", partial(functional.silu, a), one),
        Operator("add", "Tensor", partial(torch.add, a, b), two),
        Operator("add of a number", "Tensor", partial(torch.add, a, 2.0), f"{one},number(float)"),
        Operator("mul", "Tensor", partial(torch.mul, a, b), two),
        Operator("div", "Tensor", partial(torch.div, a, b), two),
        Operator("maximum", "default", partial(torch.maximum, a, b), two),
        Operator("minimum", "default", partial(torch.minimum, a, b), two),
        Operator("_softmax", "default", partial(torch.softmax, a, -1), one, softmax),
        Operator(
            "native_layer_norm", "default", partial(torch.native_layer_norm, a, [columns], weight, weight, 1e-5),
            three, norm,
        ),
        Operator("gelu_backward", "default", partial(aten.gelu_backward, a, b), two),
        Operator("silu_backward", "default", partial(aten.silu_backward, a, b), two),
        Operator("mm", "default", partial(torch.mm, matrix, matrix), two),
        Operator("addmm", "default", partial(torch.addmm, matrix[0], matrix, matrix), three),
        Operator("bmm", "default", partial(torch.bmm, batch, batch), two),
    ]  # fmt: skip


def source_of(op: str, device: str) -> tuple[str, str] | None:
    """Return a kernel's text and the suffix of its file; None if there is none for the device."""
    if device == "cuda" and (TRITON / op).is_dir():
        return (TRITON / op / f"{op}_implementation_1.py").read_text(), ".py"
    if op not in POINTWISE:
        return None
    inputs, triton, cpp = POINTWISE[op]
    names = ["self", "other"][: len(inputs)]
    by_name = dict(zip(inputs, names, strict=True))
    if device == "cuda":
        loads = "\n".join(f"    {x} = tl.load({n} + at, mask=inside).to(tl.float32)" for x, n in by_name.items())
        pointers = ", ".join(names)
        return TRITON_TEXT.format(
            op=op, pointers=pointers, names=pointers, first=names[0], loads=loads, value=triton
        ), ".py"  # fmt: skip
    return CPP_TEXT.format(
        op=op,
        first=names[0],
        parameters=", ".join(f"const at::Tensor& {name}" for name in names),
        tensors=", ".join(f"Tensor {name}" for name in names),
        pointers=" ".join(f"const float* from_{x} = {n}.const_data_ptr<float>();" for x, n in by_name.items()),
        loads=" ".join(f"const float {x} = from_{x}[i];" for x in inputs),
        value=cpp,
    ), ".cpp"


def write(root: Path, one: Operator, source: tuple[str, str], device: str, most: int) -> Path:
    """Write a kernel with a proof for tensors of up to some size; return its folder."""
    folder = root / one.op
    folder.mkdir(parents=True)
    file = folder / f"{one.op}_implementation_1{source[1]}"
    file.write_text(source[0])
    kernel = kernel_from_file(file, one.op)
    count = one.signature.count(",") + 1
    row = {
        "rank": [0, 4], "numel": [1, most], "extents": [[[1, most]] * 4] * count,
        "layouts": ["contiguous", "offset", "strided", SHAPES_DIFFER], "timed": [[1, most, True]],
        "arguments": one.arguments,
    }  # fmt: skip
    proof = {
        "opforge_proof": PROOF_FORMAT, "digest": kernel.digest, "torch": torch.__version__,
        "device": device_name(device), "suites": [], "operators": {f"{one.op}.{one.overload}": {one.signature: row}},
    }  # fmt: skip
    proof_path(file).write_text(json.dumps(sign_proof(load_or_create_key(), proof)))
    return root


@contextmanager
def enabled(root: Path, one: Operator, device: str, *, native: bool) -> Iterator[Any]:
    """Enable a kernel; a launch plan is made for the call."""
    os.environ[NATIVE_VARIABLE] = str(int(native))
    with opforge.enabled(root, device=device, ops=[one.op], learn="request") as made:
        one.call()
        made.learn()
        yield made


@contextmanager
def plain(one: Operator, function: Callable[..., Any], device: str) -> Iterator[None]:
    """Put a function in place as torch.library does it, with nothing around it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = f"{one.op}.{one.overload}".removesuffix(".default")
        library.impl(name, function, device.upper(), allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def ways(one: Operator, root: Path, device: str, *, gems: bool) -> dict[str, Way]:
    """Return the ways of putting a kernel in place, each as what gives a context in which it is there."""
    declines = (DECLINES.format(op=one.op), ".py")
    unproven = write(root / "unproven", one, declines, device, NOT_PROVEN)
    found: dict[str, Way] = {
        "ATen again": nullcontext,
        "passed on": partial(enabled, unproven, one, device, native=True),
        "passed on, Python": partial(enabled, unproven, one, device, native=False),
    }
    if (source := source_of(one.op, device)) is not None:
        proven = write(root / "proven", one, source, device, PROVEN)
        found["served"] = partial(enabled, proven, one, device, native=True)
        found["served, Python"] = partial(enabled, proven, one, device, native=False)
        if source[1] == ".py":
            (file,) = (proven / one.op).glob("*.py")
            function = load_function(file, (f"{one.op}_kernel_impl",))
            found["Library.impl"] = partial(plain, one, function, device)
    if gems:
        import flag_gems

        functions = {entry[0]: entry[1].__name__ for entry in flag_gems._FULL_CONFIG}  # _softmax's is called softmax
        if function := functions.get(f"{one.op}.{one.overload}".removesuffix(".default")):
            found["FlagGems"] = lambda: flag_gems.use_gems(include=[function])
    return found


def time_call(call: Callable[[], Any], count: int, device: str) -> float:
    """Return the time of a call, µs: of this thread on a CPU; on a GPU without waiting for it."""
    settle, clock = (torch.cuda.synchronize, time.perf_counter) if device == "cuda" else (nullcontext, time.thread_time)
    for _ in range(min(count, 20)):
        call()
    settle()
    begun = clock()
    for _ in range(count):
        call()
    took = clock() - begun
    settle()
    return took / count * 1e6


def measure(one: Operator, root: Path, given: argparse.Namespace) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Return the times of a call and of ATen's in every round by way, and how many served calls were native."""
    call = partial(time_call, one.call, given.calls, given.device)
    pairs: dict[str, list[tuple[float, float]]] = {}
    counted = ""
    for name, way in ways(one, root, given.device, gems=given.flag_gems).items():
        if name not in NATIVE_WAYS:  # put in place anew in each round
            pairs[name] = []
            for _ in range(SLOW_ROUNDS if name != "ATen again" else given.rounds):
                aten = call()
                with way():
                    pairs[name].append((call(), aten))
            continue
        with way() as made:
            pairs[name] = [pair(call, call, aten_first=number % 2 == 0) for number in range(given.rounds)]
            if name == "served":
                counters = made.counters().values()
                served, replayed = (sum(c.get(key, 0) for c in counters) for key in ("served", "replayed"))
                counted = f"{replayed} of {served} replayed" if given.device == "cuda" else f"{served} served"
    return pairs, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ops", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--flag-gems", action="store_true", help="FlagGems too, if it is installed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = ["ATen again", "passed on", "served", "passed on, Python", "served, Python", "Library.impl", "FlagGems"]
    rows = rows if given.flag_gems else rows[:-1]
    print(
        f"{device_name(given.device)}, torch {torch.__version__}; µs a call by ATen, and µs more in other ways: "
        f"medians over {given.rounds} rounds of {given.calls} calls"
    )
    print(f"{'':18} {'':5} {'ATen':>8}" + "".join(f"{name:>19}" for name in rows))
    differences: dict[str, list[float]] = {name: [] for name in rows}
    ratios: list[float] = []
    for size in given.sizes.split(","):
        for one in operators(given.device, *SIZES[given.device][size]):
            if given.ops and one.op not in given.ops.split(","):
                continue
            root = Path(tempfile.mkdtemp())
            with contextlib.ExitStack() as stack:
                stack.callback(shutil.rmtree, root)
                pairs, served = measure(one, root, given)
            more = {name: statistics.median(t - aten for t, aten in rounds) for name, rounds in pairs.items()}
            ratios.append(statistics.median(t / aten for t, aten in pairs["passed on"]))
            aten_us = statistics.median(aten for _, aten in pairs["passed on"])
            for name in rows:
                differences[name] += [more[name]] if name in more else []
            cells = "".join(f"{more[name]:>+19.2f}" if name in more else f"{'':>19}" for name in rows)
            print(f"{one.name:18} {size} {aten_us:>8.2f}{cells}   {served}", flush=True)
    cells = "".join(f"{max(differences[n]):>+19.2f}" if differences[n] else f"{'':>19}" for n in rows)
    print(f"{'worst':18} {'':5} {'':>8}{cells}")
    print(f"passed on, times ATen's call: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
