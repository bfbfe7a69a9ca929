"""Interface to a language model: a provider that answers requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from opforge.errors import OpforgeError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a model."""

    model: str
    system: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    """None for the model's default."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost of a request, including failed tries as far as they are known."""

    input_tokens: int
    output_tokens: int
    cost: float | None
    """USD; None if no price is known."""

    @classmethod
    def from_wire(cls, row: Mapping[str, Any]) -> Usage:
        """Return the usage in a row that may lack it."""
        return cls(row.get("input_tokens", 0), row.get("output_tokens", 0), row.get("cost"))

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Usage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens, cost)


@dataclass(frozen=True, slots=True)
class Spent:
    """Amounts used so far."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """USD, for the requests with a known price."""
    unpriced: int = 0
    """Number of requests without a known price."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def plus(self, usage: Usage) -> Spent:
        return Spent(
            self.requests + 1,
            self.input_tokens + usage.input_tokens,
            self.output_tokens + usage.output_tokens,
            self.cost + (usage.cost or 0.0),
            self.unpriced + (usage.cost is None),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply."""

    text: str
    usage: Usage
    stop: str
    """Why it ended: ``end``, ``max_tokens``, ``refusal``, or the provider's own term."""


def silent(_text: str) -> None:
    """Ignore a progress message."""


FREE_PROVIDER = "transcript"
"""Name of the provider that replays replies, which costs nothing."""


class Provider(Protocol):
    """A source of replies."""

    name: str

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        """Return the whole reply, or raise ``ProviderError``; may be called from several threads.

        ``waiting`` gets messages about retries.
        """
        ...


NO_USAGE = Usage(0, 0, 0.0)


class ProviderError(OpforgeError):
    """No reply will come: retries are spent, the key is bad, or the request is refused."""

    def __init__(self, text: str, usage: Usage = NO_USAGE) -> None:
        super().__init__(text)
        self.usage = usage
        """Usage of the failed tries, as far as it is known."""


class MissingKeyError(ProviderError):
    """The environment holds no key for the provider."""
