"""Built-in prices, and the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from opforge.errors import OpforgeError
from opforge.generate.prices import Prices, max_input_tokens
from opforge.generate.provider import Message, Request, Usage


def test_a_name_covers_its_snapshots_and_no_other_model() -> None:
    prices = Prices.load()
    known = prices.find("claude-sonnet-4-5")
    assert known is not None
    assert prices.find("claude-sonnet-4-5-20250929") == known
    assert prices.find("gpt-4.1-2025-04-14") == prices.find("gpt-4.1") != prices.find("gpt-4.1-mini")
    for stranger in ("gpt-4.1-maxi", "claude", "claude-sonnet-4-55", "my-gpt-5", "gpt-5-2025"):
        assert prices.find(stranger) is None


def test_cost_of_tokens() -> None:
    prices = Prices.load()
    assert prices.usage("claude-sonnet-4-5", 1_000_000, 100_000) == Usage(1_000_000, 100_000, pytest.approx(4.5))
    assert prices.usage("claude-haiku-5-5", 100_000, 1000).cost == pytest.approx(0.0105)
    assert prices.usage("claude-haiku-5-5", 100_001, 1000).cost == pytest.approx(0.0525, rel=1e-3)
    assert prices.usage("stranger", 5, 6) == Usage(5, 6, None)


def test_a_file_of_the_users_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('"gpt-5" = { input = 1, output = 2.5 }\n"my-*" = { input = 0, output = 0 }\n')
    prices = Prices.load(file)
    assert prices.usage("gpt-5", 1_000_000, 1_000_000).cost == 3.5
    assert prices.usage("my-model", 7, 7).cost == 0
    assert prices.find("gpt-5-mini") == Prices.load().find("gpt-5-mini")


@pytest.mark.parametrize(
    "text, words",
    [
        ("gpt-5", "is not TOML"),
        ('"m" = 3', "expected a line like"),
        ('"m" = { input = 3 }', "expected a line like"),
        ('"m" = { input = 3, output = 1, tax = 2 }', "also allowed: long_above"),
        ('"m" = { input = -3, output = 1 }', "input is -3"),
        ('"m" = { input = "3", output = 1 }', "input is '3'"),
        ('"m" = { input = nan, output = 1 }', "input is nan"),
        ('"m" = { input = 3, output = 1, long_above = 5 }', "needs long_input"),
    ],
)
def test_a_file_that_is_wrong_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(OpforgeError, match=words) as caught:
        Prices.load(tmp_path / "p.toml")
    assert "p.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OpforgeError, match="No such file"):
        Prices.load(tmp_path / "none.toml")


def test_the_most_that_a_request_can_come_to_counts_every_part() -> None:
    request = Request("m", "s" * 100, (Message("user", "u" * 200), Message("assistant", "ü" * 50)), 10)
    assert 200 <= max_input_tokens(request) <= 300
