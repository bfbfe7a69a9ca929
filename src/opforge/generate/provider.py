"""What a language model is to the rest of the house: something that answers a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from opforge.errors import OpforgeError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a model."""

    model: str
    system: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    """None for the model's own."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took; tries that came to nothing are in it, as far as their figures are known."""

    input_tokens: int
    output_tokens: int
    cost: float | None
    """USD; None where no price is known."""

    def __add__(self, other: Usage) -> Usage:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Usage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens, cost)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered."""

    text: str
    usage: Usage
    stop: str
    """Why it ended: ``end``, ``max_tokens``, ``refusal``, or the provider's own word."""


def silent(_text: str) -> None:
    """Hear nothing."""


class Provider(Protocol):
    """A source of replies."""

    name: str

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        """Return the whole reply, or raise ``ProviderError``; may be called from several threads. ``waiting`` hears of retries, in words."""
        ...


NOTHING = Usage(0, 0, 0.0)


class ProviderError(OpforgeError):
    """No reply, and none will come: retries are spent, the key is bad, or the request is refused."""

    def __init__(self, text: str, usage: Usage = NOTHING) -> None:
        super().__init__(text)
        self.usage = usage
        """What the tries took, as far as it is known."""


class MissingKeyError(ProviderError):
    """The environment holds no key for the provider."""
