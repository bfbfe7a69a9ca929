"""Token prices: a built-in list, and a user's file that takes precedence."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from opforge.errors import OpforgeError
from opforge.generate.provider import Request, Usage

_DATE_SUFFIX = re.compile(r"-(\d{8}|\d{4}-\d{2}-\d{2}|latest)$")
"""Suffix of a model's name that does not change its price."""


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in USD per million tokens."""

    input: float
    output: float
    long_above: int | None = None
    """Requests with more input tokens than this pay the ``long_`` prices for all their tokens."""
    long_input: float = 0.0
    long_output: float = 0.0

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        if self.long_above is not None and input_tokens > self.long_above:
            return (input_tokens * self.long_input + output_tokens * self.long_output) / 1e6
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


class Prices:
    """Prices by model.

    A built-in name covers its dated snapshots; a name in a user's file may contain ``*``.
    """

    def __init__(self, builtin: Mapping[str, Price], overrides: Mapping[str, Price] | None = None) -> None:
        self._builtin = builtin
        self._overrides = overrides or {}

    @classmethod
    def load(cls, file: Path | None = None) -> Prices:
        """Return the built-in prices, with those in a user's file taking precedence."""
        return cls(_builtin_prices(), _read(file) if file is not None else None)

    def find(self, model: str) -> Price | None:
        for pattern, price in self._overrides.items():
            if fnmatchcase(model, pattern):
                return price
        return self._builtin.get(model) or self._builtin.get(_DATE_SUFFIX.sub("", model))

    def usage(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        """Return the usage for these tokens, with their cost."""
        price = self.find(model)
        return Usage(input_tokens, output_tokens, None if price is None else price.cost(input_tokens, output_tokens))


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text at one per four bytes, for servers that report none."""
    return -(-len(text.encode()) // 4)


def max_input_tokens(request: Request) -> int:
    """Return the maximum number of tokens in a request.

    One token per two bytes is more than words or code have; each text adds 16.
    """
    texts = [request.system, *(message.text for message in request.messages)]
    return sum(-(-len(text.encode()) // 2) + 16 for text in texts)


@cache
def _builtin_prices() -> Mapping[str, Price]:
    return _parse(files("opforge.generate").joinpath("prices.toml").read_text(encoding="utf-8"), "prices.toml")


def _read(file: Path) -> Mapping[str, Price]:
    try:
        return _parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise OpforgeError(f"the file of prices {str(file)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OpforgeError(f"the file of prices {str(file)!r} is not UTF-8 text") from None


def _parse(text: str, where: str) -> dict[str, Price]:
    try:
        rows = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OpforgeError(f"{where} is not TOML: {error}") from None
    return {model: _parse_price(row, f"{where}, {model!r}") for model, row in rows.items()}


def _parse_price(row: Any, where: str) -> Price:
    allowed = {field.name for field in fields(Price)}
    if not isinstance(row, dict) or not {"input", "output"} <= row.keys() <= allowed:
        raise OpforgeError(
            f'{where}: expected a line like "name" = {{ input = 3.0, output = 15.0 }}, in USD per million tokens; '
            f"also allowed: {', '.join(sorted(allowed - {'input', 'output'}))}"
        )
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise OpforgeError(f"{where}: {name} is {value!r}; it must be a number, 0 or more")
    if "long_above" in row and not {"long_input", "long_output"} <= row.keys():
        raise OpforgeError(f"{where}: long_above needs long_input and long_output")
    return Price(**row)
