"""Time each operator beside PyTorch, without and with torch.compile: python benchmarks/bench.py."""

import argparse
{% if cookiecutter.variant == "triton" %}
import os
{% endif %}
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer

Row = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def rows(device: str, count: int, size: int, dtype: torch.dtype) -> dict[str, Row]:
    """Return for each operator: itself, the same in PyTorch, and arguments."""
    import {{ cookiecutter.package }} as own

    x, y = (torch.randn(count, size, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(size, device=device, dtype=dtype)
    return {
        "swiglu": (own.swiglu, lambda gate, up: torch.nn.functional.silu(gate) * up, (x, y)),
        "row_moments": (own.row_moments, lambda x: (x.mean(-1), x.var(-1, correction=0)), (x,)),
        "add_scaled_": (own.add_scaled_, lambda x, y, alpha: x.add_(y, alpha=alpha), (x, y, 0.0)),
        "rms_norm": (own.rms_norm, lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6), (x, weight)),
    }


def microseconds(function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> str:
    """Return median time and spread of a call."""
    function(*args)  # compiles and tunes
    timed = Timer("f(*args)", globals={"f": function, "args": args}).blocked_autorange(min_run_time=seconds)
    return f"{timed.median * 1e6:10.1f} ± {timed.iqr * 1e6 / 2:<8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="how many rows: 4096 unless given, 4 where kernels are interpreted")
    parser.add_argument("--size", type=int, default=1024, help="length of a row")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each is timed")
    parser.add_argument("--eager", action="store_true", help="leave out what torch.compile makes of PyTorch's own")
    given = parser.parse_args()
{% if cookiecutter.variant == "triton" %}
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stderr.write("kernels are interpreted on the CPU: these times say nothing of a GPU\n")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    count = given.rows or (4 if interpreted else 4096)
{% else %}
    count = given.rows or 4096
{% endif %}
    compiled = "" if given.eager else f"{'PyTorch compiled':>28}"
    sys.stdout.write(f"{'microseconds':<14}{'{{ cookiecutter.package }}':>14}{'PyTorch':>23}{compiled}\n")
    for name, (own, theirs, args) in rows(given.device, count, given.size, getattr(torch, given.dtype)).items():
        torch.compiler.reset()
        raced = (own, theirs) if given.eager else (own, theirs, torch.compile(theirs))
        times = [microseconds(one, args, given.seconds) for one in raced]
        sys.stdout.write(f"{name:<14}{'  '.join(times)}\n")


if __name__ == "__main__":
    main()
