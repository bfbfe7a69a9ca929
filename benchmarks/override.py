"""What a kernel in ATen's place costs by the way it is put there: a call of an operator on small tensors, µs.

The ways take turns in every round, and the least of many rounds counts: what disturbs a call only makes it slower. The kernel is the same in all of them:
a small one that makes a call of ATen's and, with ``--triton``, the one in examples/triton_kernels. What is "passed on" is not proven, and ATen answers it.

    python benchmarks/override.py [--device cuda --triton --flag-gems]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

import opforge
from opforge.backends.directory import kernel_from_file
from opforge.kernels.proof import proof_path
from opforge.runtime.devices import device_name
from opforge.runtime.loading import load_function
from opforge.runtime.proof_files import PROOF_FORMAT, sign_proof
from opforge.runtime.signing import load_or_create_key

SMALL = {
    "relu": "import torch\ndef relu_kernel_impl(self):\n    return torch.clamp(self, min=0)\n",
    "add": "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n    return torch.sub(self, other, alpha=-alpha)\n",
}
CALLED = {"relu": torch.relu, "add": torch.add}
SIGNATURE = {"relu": "float32", "add": "float32,float32"}
TRITON = Path(__file__).parents[1] / "examples" / "triton_kernels"
PROVEN, NOT_PROVEN = 1 << 20, 4
ROUNDS, CALLS = 60, 300


@contextmanager
def plain(op: str, function: Callable[..., torch.Tensor], device: str) -> Iterator[None]:
    """Put a function in place as torch.library does it, without anything around."""
    library = torch.library.Library("aten", "IMPL")
    name = {"relu": "relu", "add": "add.Tensor"}[op]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, device.upper(), allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def ways(op: str, source: str, root: Path, device: str, *, gems: bool) -> dict[str, Callable[[], object]]:
    """Return the ways by name, each as what gives a context in which it holds."""
    file = _write(root / "proven", op, source, device, PROVEN)
    _write(root / "unproven", op, source, device, NOT_PROVEN)
    function = load_function(file, (f"{op}_kernel_impl",))
    found: dict[str, Callable[[], object]] = {
        "ATen": nullcontext,
        "plain Library.impl": lambda: plain(op, function, device),
        "enable, proven": lambda: opforge.enabled(root / "proven", device=device, ops=[op]),
        "enable, all": lambda: opforge.enabled(root / "proven", device=device, ops=[op], policy="all"),
        "enable, passed on": lambda: opforge.enabled(root / "unproven", device=device, ops=[op]),
    }
    if gems:
        import flag_gems

        found["FlagGems"] = lambda: flag_gems.use_gems(include=[op])
    return found


def _write(root: Path, op: str, source: str, device: str, most: int) -> Path:
    """Write a kernel with a proof for tensors of some sizes; return its file."""
    folder = root / op
    folder.mkdir(parents=True)
    file = folder / f"{op}_implementation_1.py"
    file.write_text(source)
    kernel = kernel_from_file(file, op)
    layouts = ["contiguous", "offset", "strided"]
    extents = [[[1, most]] * 4] * len(SIGNATURE[op].split(","))
    proven = {"rank": [0, 4], "numel": [1, most], "extents": extents, "layouts": layouts, "timed": [[1, most, True]]}
    proof = {"digest": kernel.digest, "torch": torch.__version__, "device": device_name(device)}
    about = {"opforge_proof": PROOF_FORMAT, "suites": [], "operators": {kernel.primary: {SIGNATURE[op]: proven}}}
    proof_path(file).write_text(json.dumps(sign_proof(load_or_create_key(), {**proof, **about})))
    return file


def measure(call: Callable[[], object], enter: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Return the least time of a call by way, µs."""
    times: dict[str, list[float]] = {name: [] for name in enter}
    for _ in range(ROUNDS):
        for name, way in enter.items():
            with way():
                for _ in range(20):
                    call()
                if device != "cpu":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(CALLS):
                    call()
                if device != "cpu":
                    torch.cuda.synchronize()
                times[name].append((time.perf_counter() - began) / CALLS * 1e6)
    return {name: min(found) for name, found in times.items()} | {
        f"{name} (median)": statistics.median(found) for name, found in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--triton", action="store_true", help="kernels in Triton besides; needs a GPU")
    parser.add_argument("--flag-gems", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{device_name(given.device)}, torch {torch.__version__}; µs a call, least of {ROUNDS} rounds of {CALLS}")
    sources = {op: {op: source} for op, source in SMALL.items()}
    if given.triton:
        for op in SMALL:
            sources[op][f"{op} Triton"] = (TRITON / op / f"{op}_implementation_1.py").read_text()
    for op, kernels in sources.items():
        tensors = [torch.randn(16, 16, device=given.device) for _ in SIGNATURE[op].split(",")]
        calls = {"": tensors, " x, x": [tensors[0]] * 2} if len(tensors) > 1 else {"": tensors}
        for (what, source), (how, args) in itertools.product(kernels.items(), calls.items()):
            with tempfile.TemporaryDirectory() as folder:
                enter = ways(op, source, Path(folder), given.device, gems=given.flag_gems and what == op and not how)
                show(what + how, measure(functools.partial(CALLED[op], *args), enter, given.device), enter)


def show(what: str, found: dict[str, float], enter: Iterable[str]) -> None:
    base = found["plain Library.impl"]
    for name in enter:
        print(f"{what:15} {name:20} {found[name]:7.2f}   {found[name] / base:5.2f} × plain Library.impl")


if __name__ == "__main__":
    main()
