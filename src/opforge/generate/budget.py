"""Spending limit of a run, checked before each request is sent.

A request is sent only if three amounts fit into the limit together: the amount spent so far, the
maximum that requests in flight can still use, and the maximum that this request can use. The
maximum is ``max_tokens`` of output, and one token of input for every two bytes.

Most requests use far less. A request that does not fit waits while others are in flight, because
they return the difference when they end. If it does not fit with nothing in flight, the budget is
spent, for this request and all later ones. Only tries that were cut off and billed anyway can
exceed the limit.

A run that its budget stopped can be continued with a larger one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.generate.journal import GenerationSummary, Journal
from opforge.generate.prices import Prices, max_input_tokens
from opforge.generate.provider import FREE_PROVIDER, Provider, ProviderError, Reply, Request, Spent, Usage, silent
from opforge.kernels.proof import proof_path
from opforge.runs.generation_context import GenerationContext


class BudgetSpentError(OpforgeError):
    """The next request could exceed the limit, so it was not sent."""


class Budget:
    """Spending limit of a run, shared by its threads."""

    def __init__(
        self,
        prices: Prices,
        max_cost: float | None = None,
        max_tokens: int | None = None,
        spent: Spent | None = None,
    ) -> None:
        for name, bound in (("--max-cost", max_cost), ("--max-tokens", max_tokens)):
            if bound is not None and not (bound > 0 and math.isfinite(bound)):
                raise OpforgeError(f"{name} {bound} is not a limit; it must be more than 0")
        self._prices = prices
        self._max_cost = max_cost
        self._max_tokens = max_tokens
        self._spent = spent or Spent()
        self._reserved: list[Usage] = []
        self._stop_reason = ""
        self._unpriced: set[str] = set()
        self._changed = threading.Condition()

    @property
    def spent(self) -> Spent:
        with self._changed:
            return self._spent

    @property
    def stop_reason(self) -> str:
        """Why no more requests are sent; empty while they are."""
        with self._changed:
            return self._stop_reason

    def ask(self, provider: Provider, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        """Ask within the budget; raise ``BudgetSpentError`` if the request does not fit."""
        free = provider.name == FREE_PROVIDER
        if not free:
            self._warn_if_unpriced(request.model, waiting)
        reserved = self._reserve(request, free=free)
        usage: Usage | None = None
        try:
            reply = provider.ask(request, waiting)
            usage = reply.usage
        except ProviderError as error:
            usage = error.usage
            raise
        finally:
            with self._changed:
                self._reserved.remove(reserved)
                if usage is not None:
                    self._spent = self._spent.plus(usage)
                self._changed.notify_all()
        return reply

    def _reserve(self, request: Request, *, free: bool) -> Usage:
        maximum = self._prices.usage(request.model, max_input_tokens(request), request.max_tokens)
        maximum = replace(maximum, cost=0.0) if free else maximum
        if self._max_cost is not None and maximum.cost is None:
            raise OpforgeError(
                f"--max-cost needs the price of model {request.model!r}, which is unknown; "
                "give it in a file (--prices), or limit tokens with --max-tokens"
            )
        with self._changed:
            while True:
                if not self._stop_reason and (exceeded := self._exceeded_limit(maximum)) and not self._reserved:
                    self._stop_reason = exceeded
                    self._changed.notify_all()
                if self._stop_reason:
                    raise BudgetSpentError(self._stop_reason)
                if not exceeded:
                    self._reserved.append(maximum)
                    return maximum
                self._changed.wait()

    def _exceeded_limit(self, maximum: Usage) -> str:
        """Return which limit a request could exceed; empty if none."""
        cost = self._spent.cost + sum(reserved.cost or 0.0 for reserved in self._reserved) + (maximum.cost or 0.0)
        if self._max_cost is not None and cost > self._max_cost:
            amount = f"{self._spent.cost:.4f} of {self._max_cost:g} USD"
            return f"the budget is spent: {amount}, and the next request can take {maximum.cost:.4f}"
        tokens = self._spent.tokens + sum(reserved.tokens for reserved in self._reserved) + maximum.tokens
        if self._max_tokens is not None and tokens > self._max_tokens:
            amount = f"{self._spent.tokens} of {self._max_tokens} tokens"
            return f"the budget is spent: {amount}, and the next request can take {maximum.tokens}"
        return ""

    def _warn_if_unpriced(self, model: str, waiting: Callable[[str], None]) -> None:
        if self._prices.find(model) is not None:
            return
        with self._changed:
            first_time = model not in self._unpriced
            self._unpriced.add(model)
        if first_time:
            waiting(f"the price of model {model!r} is unknown: tokens are counted, cost is not")


def with_raised_limits(folder: Path, generation: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return a run's generation options with new spending limits.

    Each limit must be more than the run has spent.
    """
    journal = Journal(folder)
    summary, spent = journal.summary(), journal.spent()
    option = {name: f"--{name.replace('_', '-')} {bound:g}" for name, bound in limits.items()}
    if summary is not None and not summary.stopped:
        given = " and ".join(option.values())
        raise OpforgeError(f"{given}: the run in {str(folder)!r} was not stopped by its budget; continue without")
    used = {"max_cost": (spent.cost, f"{spent.cost:.4f} USD"), "max_tokens": (spent.tokens, f"{spent.tokens} tokens")}
    for name, bound in limits.items():
        amount, amount_text = used[name]
        if not (bound > amount and math.isfinite(bound)):
            raise OpforgeError(
                f"{option[name]} is too small for the run in {str(folder)!r}: "
                f"it must be more than the {amount_text} that were spent there"
            )
    return {**generation, **limits}


def reopen(journal: Journal, summary: GenerationSummary, context: GenerationContext) -> None:
    """Undo the end of a run that still had attempts left; the attempts stay.

    If this is interrupted, it is done again from the start: the summary is removed last.
    """
    context.drop_verdicts()
    for kept in summary.operators:
        if kept.file is not None and journal.winner(kept.name) is None:
            _withdraw(Path(kept.file), journal, kept.name)
    journal.drop_summary()


def _withdraw(file: Path, journal: Journal, name: str) -> None:
    """Remove a kernel from a directory, unless it was changed since it was written."""
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace") in journal.sources(name):
        file.unlink()
        proof_path(file).unlink(missing_ok=True)
