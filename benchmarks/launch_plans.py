"""What a call costs on a GPU: by ATen, passed on to ATen, replayed from a launch plan, and by the same Triton kernel from Python.

All ways take turns in every round; the figures are medians over the rounds of the difference to ATen's call in the same
round. The kernels are those of examples/triton_kernels. BERT runs with all of them, at two batch sizes.

    python benchmarks/launch_plans.py [--rounds 16 --calls 300]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import opforge
from opforge.backends.directory import kernel_from_file
from opforge.kernels.proof import proof_path
from opforge.runtime.devices import device_name
from opforge.runtime.enabling import NATIVE_VARIABLE, Enabled
from opforge.runtime.proof_files import PROOF_FORMAT, sign_proof
from opforge.runtime.signing import load_or_create_key

KERNELS = Path(__file__).parents[1] / "examples" / "triton_kernels"
DECLINES = "def {op}_kernel_impl(*_args, **_kwargs):\n    raise NotImplementedError\n"
WAYS = ("ATen", "passed on", "replayed", "Python kernel")
PYTHON_ROUNDS = 5
SIZES = {"small": (32, 128, 256), "large": (8192, 4096, 4096)}
"""Rows and columns of most operators, and the side of matrices."""


def calls(rows: int, columns: int, side: int) -> dict[str, Callable[[], Any]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    a, b, weight, matrix = random(rows, columns), random(rows, columns), random(columns), random(side, side)
    batch = random(4, side // 4, side // 4)
    return {
        "relu": partial(torch.relu, a),
        "gelu": partial(functional.gelu, a),
        "silu": partial(functional.silu, a),
        "sigmoid": partial(torch.sigmoid, a),
        "add": partial(torch.add, a, b),
        "add of a number": partial(torch.add, a, 2.0),
        "mul": partial(torch.mul, a, b),
        "_softmax": partial(torch.softmax, a, -1),
        "native_layer_norm": partial(torch.native_layer_norm, a, [columns], weight, weight, 1e-5),
        "gelu_backward": partial(torch.ops.aten.gelu_backward, a, b),
        "silu_backward": partial(torch.ops.aten.silu_backward, a, b),
        "mm": partial(torch.mm, matrix, matrix),
        "addmm": partial(torch.addmm, matrix[0], matrix, matrix),
        "bmm": partial(torch.bmm, batch, batch),
    }


def not_proven(root: Path, op: str) -> Path:
    """Write a kernel that is proven only for other sizes; return its folder."""
    (root / op).mkdir(parents=True)
    file = root / op / f"{op}_implementation_1.py"
    file.write_text(DECLINES.format(op=op))
    kernel = kernel_from_file(file, op)
    row = {
        "rank": [0, 4], "numel": [1, 2], "extents": [[[1, 2]] * 4] * 3, "layouts": ["contiguous"],
        "timed": [[1, 2, True]],
    }  # fmt: skip
    signatures = (",".join(["float16"] * count) for count in (1, 2, 3))
    proof = {
        "opforge_proof": PROOF_FORMAT, "digest": kernel.digest, "torch": torch.__version__,
        "device": device_name("cuda"), "suites": [], "operators": {kernel.primary: dict.fromkeys(signatures, row)},
    }  # fmt: skip
    proof_path(file).write_text(json.dumps(sign_proof(load_or_create_key(), proof)))
    return root


def enable(way: str, ops: list[str], unproven: Path | None, call: Callable[[], Any]) -> Enabled | None:
    """Enable kernels in one of the ways. Plans are made for what ``call`` calls."""
    if way == "ATen":
        return None
    os.environ[NATIVE_VARIABLE] = str(int(way != "Python kernel"))
    if way == "passed on":
        return opforge.enable(unproven or KERNELS, device="cuda", ops=ops)
    enabled = opforge.enable(KERNELS, device="cuda", policy="all", ops=ops, learn="request")
    call()
    enabled.learn()
    return enabled


def measure(call: Callable[[], Any], count: int, *, wait: bool = False) -> float:
    """Return the time of a call, µs; with ``wait``, with its work on the GPU."""
    for _ in range(min(count, 20)):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    if wait:
        torch.cuda.synchronize()
    took = time.perf_counter() - begun
    torch.cuda.synchronize()
    return took / count * 1e6


def time_operators(rounds: int, count: int) -> None:
    for size, numbers in SIZES.items():
        for name, call in calls(*numbers).items():
            op = name.partition(" ")[0]
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            replayed = served = 0
            with tempfile.TemporaryDirectory() as folder:
                unproven = not_proven(Path(folder), op)
                for round_number in range(rounds):
                    for way in WAYS if round_number < PYTHON_ROUNDS else WAYS[:-1]:
                        enabled = enable(way, [op], unproven, call)
                        times[way].append(measure(call, count))
                        if enabled is not None:
                            if way == "replayed":
                                counters = enabled.counters().values()
                                replayed += sum(c.get("replayed", 0) for c in counters)
                                served += sum(c["served"] for c in counters)
                            enabled.disable()
            more = {w: statistics.median(t - a for t, a in zip(times[w], times["ATen"], strict=False)) for w in WAYS}
            print(
                f"{name:18} {size:6} {statistics.median(times['ATen']):7.2f} {more['passed on']:+10.2f} "
                f"{more['replayed']:+9.2f} {more['Python kernel']:+14.2f}   {replayed} of {served}",
                flush=True,
            )


def time_model(rounds: int) -> None:
    from transformers import BertConfig, BertModel

    ops = ["native_layer_norm", "gelu", "add", "mul", "_softmax"]
    for batch, length in ((1, 128), (32, 512)):
        model = BertModel(BertConfig()).cuda().half().eval()
        tokens = torch.randint(0, 30000, (batch, length), device="cuda")

        def step(model: Any = model, tokens: torch.Tensor = tokens) -> torch.Tensor:
            with torch.no_grad():
                result: torch.Tensor = model(tokens).last_hidden_state
            return result

        ways = ("ATen", "replayed", "Python kernel")
        times: dict[str, list[float]] = {way: [] for way in ways}
        expected, error, counted = step(), 0.0, ""
        for _ in range(rounds):
            for way in ways:
                enabled = enable(way, ops, None, step)
                times[way].append(measure(step, 10, wait=True) / 1000)
                if enabled is not None:
                    error = max(error, float((step() - expected).abs().max()))
                    if way == "replayed":
                        counters = enabled.counters().values()
                        total = sum(c["served"] for c in counters)
                        counted = f"{sum(c.get('replayed', 0) for c in counters)} of {total} served calls replayed"
                    enabled.disable()
        figures = ", ".join(f"{way} {statistics.median(times[way]):.2f}" for way in ways)
        print(f"BERT base float16, {batch} × {length}, ms: {figures}; {counted}; largest difference {error:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    print(
        f"{device_name('cuda')}, torch {torch.__version__}; medians over {given.rounds} rounds of {given.calls} calls, µs"
    )
    print(f"{'':18} {'':6} {'ATen':>7} {'passed on':>10} {'replayed':>9} {'Python kernel':>14}   served calls replayed")
    time_operators(given.rounds, given.calls)
    time_model(max(3, given.rounds // 2))


if __name__ == "__main__":
    main()
