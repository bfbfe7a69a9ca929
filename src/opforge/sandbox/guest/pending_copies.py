"""Results of calls on a GPU that are copied after many calls.

Where processes share a GPU, each wait for it costs a time slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.cuda import Event, synchronize

from opforge.sandbox.guest.loader import describe_exception

_MAX_PENDING_BYTES = 256 << 20
"""Memory of results that wait to be copied."""
MAX_CLONED_BYTES = 16 << 20
"""Larger results are waited for: a clone might not fit beside them."""


class FailedTogetherError(Exception):
    """Calls that were queued together failed on the GPU: which of them is not known."""


class PendingCopies:
    """What calls left on the GPU, cloned there as each call returned, until all is copied at once."""

    def __init__(self, tell_running: Callable[[int], None]) -> None:
        """Create an empty list; ``tell_running`` gets the number of the call that is waited for."""
        self._tell_running = tell_running
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls: list[tuple[int, Event]] = []
        self._bytes = 0

    def add(self, target: torch.Tensor, source: torch.Tensor, *, is_private: bool) -> None:
        """Have bytes copied later, as they are when the GPU comes to this place of its stream."""
        self._copies.append((target, source if is_private else source.clone()))
        self._bytes += source.numel()

    def end_call(self, number: int) -> None:
        """Note that all of a call is queued; wait if much is pending."""
        event = Event()
        event.record()
        self._calls.append((number, event))
        if self._bytes > _MAX_PENDING_BYTES:
            self.finish()

    def finish(self) -> None:
        """Wait for the calls, one after another, and copy what they left."""
        calls, copies = self._calls, self._copies
        self._calls, self._copies, self._bytes = [], [], 0
        try:
            for number, event in calls:
                self._tell_running(number)
                event.synchronize()
            synchronize()
            for target, source in copies:
                target.copy_(source)
        except Exception as error:  # noqa: BLE001  # torch has many types for errors of a GPU
            raise FailedTogetherError(describe_exception(error)) from None
