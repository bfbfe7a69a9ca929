"""Triton's tuner where nothing is timed: it tries each configuration for a moment, for what is only judged need not be the fastest."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

WARM_MS, MEASURED_MS = 1, 4
"""For a configuration; Triton takes 25 and 100, which in a run of many kernels at once is most of what the GPU does."""


def keep_short() -> None:
    """Have the tuner be quick in this process. Nothing happens where Triton is not imported, or a second time."""
    found = getattr(sys.modules.get("triton.backends"), "backends", {})
    for backend in found.values():
        benchmarker = getattr(backend.driver, "get_benchmarker", None)
        if benchmarker is not None and benchmarker.__module__ != __name__:
            backend.driver.get_benchmarker = _short(benchmarker)


def _short(benchmarker: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def get_benchmarker(driver: Any) -> Callable[..., Any]:
        return functools.partial(_measured, benchmarker(driver))

    return get_benchmarker


def _measured(
    measure: Callable[..., Any], function: Any, warmup: float = WARM_MS, rep: float = MEASURED_MS, **options: Any
) -> Any:
    return measure(function, warmup=warmup, rep=rep, **options)
