"""Budgets: never passed by many threads, never in the way of what fits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from opforge.errors import OpforgeError
from opforge.generate.budget import Budget, BudgetSpentError
from opforge.generate.prices import Prices, max_input_tokens
from opforge.generate.provider import Message, ProviderError, Reply, Request, Spent, Usage, silent

PRICES = Prices.load()
MODEL = "claude-sonnet-5"
REQUEST = Request(MODEL, "", (Message("user", "write relu"),), 1000)
MOST = max_input_tokens(REQUEST) + REQUEST.max_tokens
"""What the request can take."""


class Answering:
    """A provider that takes as many tokens as it is told."""

    name = "answering"

    def __init__(self, output_tokens: int = REQUEST.max_tokens, input_tokens: int = MOST - REQUEST.max_tokens) -> None:
        self.took = PRICES.usage(MODEL, input_tokens, output_tokens)
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        with self._lock:
            self.asked += 1
        self.gate.wait(60)
        return Reply("", self.took, "end")


class Failing(Answering):
    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        raise ProviderError("cut", self.took)


def test_what_is_taken_is_counted() -> None:
    budget = Budget(PRICES, spent=Spent().plus(Usage(10, 5, None)))
    budget.ask(Answering(50, 100), REQUEST)
    assert budget.spent == Spent(2, 110, 55, pytest.approx((100 * 2 + 50 * 10) / 1e6), 1)
    assert budget.spent.tokens == 165


def test_failed_requests_are_counted_too() -> None:
    budget = Budget(PRICES, max_tokens=MOST + 10)
    with pytest.raises(ProviderError, match="cut"):
        budget.ask(Failing(30, 20), REQUEST)
    assert (budget.spent.requests, budget.spent.tokens) == (1, 50)
    with pytest.raises(BudgetSpentError):
        budget.ask(Answering(), REQUEST)


@pytest.mark.parametrize("bound", [{"max_tokens": 10 * MOST}, {"max_cost": 10 * 0.0101}], ids=["tokens", "cost"])
def test_many_threads_do_not_pass_it(bound: dict[str, float]) -> None:
    provider = Answering()
    assert provider.took.cost is not None
    assert provider.took.cost < 0.0101
    budget = Budget(PRICES, **bound)  # ten of the largest replies fit, and not eleven
    refused = []

    def ask(_number: int) -> None:
        try:
            budget.ask(provider, REQUEST)
        except BudgetSpentError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(100)))
    assert provider.asked == 10
    assert len(refused) == 90
    assert budget.spent.requests == 10
    assert set(refused) == {budget.stop_reason}
    assert budget.stop_reason.startswith("the budget is spent: ")


def test_what_was_held_and_not_taken_is_given_back() -> None:
    provider = Answering(output_tokens=5, input_tokens=5)
    budget = Budget(PRICES, max_tokens=MOST + 100)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: budget.ask(provider, REQUEST), range(10)))
    assert budget.spent.tokens == 100
    assert not budget.stop_reason


@pytest.mark.parametrize("bound", [{"max_tokens": MOST + 100}, {"max_cost": 0.0105}], ids=["tokens", "cost"])
def test_a_request_waits_for_those_on_their_way(bound: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Answering(5, 5)
    provider.gate.clear()
    budget = Budget(PRICES, **bound)
    waits = threading.Event()
    wait = budget._changed.wait

    def heard() -> bool:
        waits.set()
        return wait()

    monkeypatch.setattr(budget._changed, "wait", heard)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(budget.ask, provider, REQUEST) for _ in range(2)]
        assert waits.wait(60)
        assert provider.asked == 1
        provider.gate.set()
        assert [one.result(60).stop for one in both] == ["end", "end"]


def test_it_goes_on_from_what_was_spent_before() -> None:
    budget = Budget(PRICES, max_tokens=1_000_000, spent=Spent(3, 900_000, 99_999, 2.0))
    provider = Answering()
    with pytest.raises(BudgetSpentError, match="999999 of 1000000 tokens"):
        budget.ask(provider, REQUEST)
    assert provider.asked == 0


def test_a_cost_that_is_not_known_cannot_be_bounded() -> None:
    stranger = Request("stranger", "", REQUEST.messages, 10)
    with pytest.raises(OpforgeError, match="--max-cost needs the price"):
        Budget(PRICES, max_cost=1).ask(Answering(), stranger)
    heard: list[str] = []
    budget = Budget(PRICES, max_tokens=100_000)
    for _ in range(3):
        budget.ask(Answering(), stranger, heard.append)
    assert len(heard) == 1
    assert "'stranger' is unknown" in heard[0]


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf")])
def test_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(OpforgeError, match="--max-cost"):
        Budget(PRICES, max_cost=bound)
