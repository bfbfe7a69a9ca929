"""Trying again: how often, after how long, and what is said when it was for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from opforge.errors import OpforgeError
from opforge.generate.provider import NOTHING, ProviderError, Reply, Usage


class TryFailedError(Exception):
    """One try came to nothing."""

    def __init__(
        self, what: str, *, again: bool, asked_s: float | None = None, advice: str = "", usage: Usage = NOTHING
    ) -> None:
        super().__init__(what)
        self.again = again
        """Whether another try may end better."""
        self.asked_s = asked_s
        """How long the server asks us to wait."""
        self.advice = advice
        self.usage = usage


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is tried, and how long the waits between are: doubled each time, up to a bound, and spread by chance."""

    tries: int = 6
    first_s: float = 1.0
    longest_s: float = 60.0
    longest_asked_s: float = 120.0
    """A server that asks for a longer wait than this gets this one."""

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise OpforgeError(f"a request must be tried at least once, not {self.tries} times")

    def wait_s(self, failed: int, asked_s: float | None = None) -> float:
        """Return how long to wait after so many failed tries; never less than the server asks for, within its bound."""
        if asked_s is not None:
            return min(asked_s, self.longest_asked_s) * random.uniform(1.0, 1.25)  # noqa: S311  # so that not all come back at once
        return min(self.first_s * 2.0 ** (failed - 1), self.longest_s) * random.uniform(0.5, 1.0)  # noqa: S311


def ask_again(
    once: Callable[[], Reply],
    name: str,
    retries: Retries,
    waiting: Callable[[str], None],
    sleep: Callable[[float], object],
) -> Reply:
    """Return the first reply that comes. Its usage has that of the failed tries in it; so has the error that is raised instead."""
    spent = NOTHING
    for number in range(1, retries.tries + 1):
        try:
            reply = once()
        except TryFailedError as error:
            failed = error
        else:
            return replace(reply, usage=spent + reply.usage)
        spent += failed.usage
        if not failed.again or number == retries.tries:
            break
        wait_s = retries.wait_s(number, failed.asked_s)
        waiting(f"{name}: {failed}; trying again in {wait_s:.1f} s ({number} of {retries.tries} tries)")
        sleep(wait_s)
    times = f" (tried {number} times)" if number > 1 else ""
    advice = failed.advice or ("wait a while, then go on with --resume" if failed.again else "")
    raise ProviderError(f"{name}: {failed}{times}{'; ' if advice else ''}{advice}", spent)
