"""Retries: how often, after how long, and the error when all fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from opforge.errors import OpforgeError
from opforge.generate.provider import NO_USAGE, ProviderError, Reply, Usage


class TryFailedError(Exception):
    """One try failed."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool,
        retry_after_s: float | None = None,
        advice: str = "",
        usage: Usage = NO_USAGE,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether a retry may succeed."""
        self.retry_after_s = retry_after_s
        """Seconds that the server asks us to wait."""
        self.advice = advice
        self.usage = usage


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of tries, and the waits between them.

    A wait doubles with each try up to a limit, and is randomised.
    """

    max_tries: int = 6
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    max_server_wait_s: float = 120.0
    """Maximum wait, if the server asks for a longer one."""

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise OpforgeError(f"a request must be tried at least once, not {self.max_tries} times")

    def wait_s(self, failed: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after this many failed tries.

        If the server asks for a wait, it is at least that long, up to ``longest_asked_s``.
        """
        if retry_after_s is not None:
            return min(retry_after_s, self.max_server_wait_s) * random.uniform(1.0, 1.25)  # noqa: S311  # spreads retries
        return min(self.first_wait_s * 2.0 ** (failed - 1), self.max_wait_s) * random.uniform(0.5, 1.0)  # noqa: S311


def ask_with_retries(
    try_once: Callable[[], Reply],
    name: str,
    retries: RetryPolicy,
    waiting: Callable[[str], None],
    sleep: Callable[[float], object],
) -> Reply:
    """Return the first reply; its usage includes that of the failed tries.

    The error that is raised if all tries fail includes it too.
    """
    spent = NO_USAGE
    for number in range(1, retries.max_tries + 1):
        try:
            reply = try_once()
        except TryFailedError as error:
            failed = error
        else:
            return replace(reply, usage=spent + reply.usage)
        spent += failed.usage
        if not failed.retryable or number == retries.max_tries:
            break
        wait_s = retries.wait_s(number, failed.retry_after_s)
        waiting(f"{name}: {failed}; trying again in {wait_s:.1f} s ({number} of {retries.max_tries} tries)")
        sleep(wait_s)
    times = f" (tried {number} times)" if number > 1 else ""
    advice = failed.advice or ("wait a while, then continue with --resume" if failed.retryable else "")
    raise ProviderError(f"{name}: {failed}{times}{'; ' if advice else ''}{advice}", spent)
