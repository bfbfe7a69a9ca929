"""Shorten Triton's autotuning where nothing is timed: such kernels need not be the fastest."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

WARM_UP_MS, MEASURED_MS = 1, 4
"""Times for one configuration.

Triton's defaults are 25 and 100; with many kernels at once they take most of the GPU's time.
"""


def keep_short() -> None:
    """Shorten autotuning in this process. Does nothing without Triton, or a second time."""
    backends = getattr(sys.modules.get("triton.backends"), "backends", {})
    for backend in backends.values():
        benchmarker = getattr(backend.driver, "get_benchmarker", None)
        if benchmarker is not None and benchmarker.__module__ != __name__:
            backend.driver.get_benchmarker = _short(benchmarker)


def _short(benchmarker: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def get_benchmarker(driver: Any) -> Callable[..., Any]:
        return functools.partial(_measured, benchmarker(driver))

    return get_benchmarker


def _measured(
    measure: Callable[..., Any], function: Any, warmup: float = WARM_UP_MS, rep: float = MEASURED_MS, **options: Any
) -> Any:
    return measure(function, warmup=warmup, rep=rep, **options)
