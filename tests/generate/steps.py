"""What a scripted server does with one request, and what it saw of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Say:
    """A whole reply."""

    text: str
    input_tokens: int = 100
    output_tokens: int = 50
    stop: str = ""
    """In the protocol's own word; empty for its usual one."""
    delay_s: float = 0
    """Before the first word."""
    usage: bool = True
    """Whether figures are sent; some OpenAI-compatible servers send none."""


@dataclass(frozen=True)
class Cut:
    """The connection ends halfway through the reply."""

    text: str
    input_tokens: int = 100
    reset: bool = False
    """By a reset, rather than by an end where more was promised."""
    clean: bool = False
    """As if that were all: no error on the wire, only no last event."""


@dataclass(frozen=True)
class Fail:
    """An error comes as an event of the stream, halfway through the reply."""

    text: str
    kind: str = "overloaded_error"
    message: str = "Overloaded"


@dataclass(frozen=True)
class Status:
    """An error instead of a reply."""

    status: int
    message: str = "as the script says"
    retry_after: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Hang:
    """Nothing comes: no answer at all, or none after half a reply; the connection stays open until someone closes it."""

    text: str = ""
    drip_s: float = 0
    """How often a sign of life comes that says nothing; 0 for never."""


@dataclass(frozen=True)
class Drop:
    """The connection is closed without an answer."""


Step = Say | Cut | Fail | Status | Hang | Drop


@dataclass(frozen=True)
class Seen:
    """A request as the server saw it."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]
    at_s: float
    """On the monotonic clock."""
    key: str = field(repr=False, default="")

    @property
    def text(self) -> str:
        """The last message, which is what the user asks."""
        return _plain(self.body["messages"][-1]["content"])


Script = Iterable[Step] | Callable[[Seen], Step]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
