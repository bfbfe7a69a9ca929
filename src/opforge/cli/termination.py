"""SIGTERM ends a command as Ctrl-C does: with what it has to leave in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a command that SIGTERM has ended."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise Terminated within the block on SIGTERM; only the main thread receives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(_number: int, _frame: object) -> NoReturn:
    raise Terminated
