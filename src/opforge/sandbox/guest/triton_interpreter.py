"""Triton's interpreter, which runs kernels where there is no GPU.

It shares its state between all threads; a GPU does not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

_LAUNCH_LOCK = threading.RLock()


def serialize_launches() -> None:
    """Let one thread launch at a time. Does nothing without the interpreter, or a second time."""
    executor = getattr(sys.modules.get("triton.runtime.interpreter"), "GridExecutor", None)
    if executor is not None and not hasattr(executor.__call__, "takes_turns"):
        executor.__call__ = _in_turn(executor.__call__)


def _in_turn(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def launched(*args: Any, **kwargs: Any) -> Any:
        with _LAUNCH_LOCK:
            return launch(*args, **kwargs)

    launched.takes_turns = True  # type: ignore[attr-defined]  # marks it as wrapped
    return launched
