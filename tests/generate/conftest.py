"""Fixtures: keys that are looked for everywhere, and both protocols with their providers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.provider import Message, Provider, Request
from opforge.generate.retry import RetryPolicy
from tests.generate.servers import AnthropicServer, ModelServer, OpenAIServer, Script

KEY = "sk-test-7Qm2xV9pLr4TnB8wZc6Y"
MODELS = {"anthropic": "claude-sonnet-5", "openai": "gpt-5", "relay": "local-model"}
SERVERS: dict[str, type[ModelServer]] = {"anthropic": AnthropicServer, "openai": OpenAIServer, "relay": OpenAIServer}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set test keys, and remove variables that would redirect a client."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPFORGE_RELAY_API_KEY"):
        monkeypatch.setenv(name, KEY)


@dataclass
class Desk:
    """A provider that asks a scripted server; it does not sleep between tries, it notes for how long it would."""

    name: str
    server: ModelServer
    provider: Provider
    slept_s: list[float] = field(default_factory=list)

    def request(self, text: str = "write relu", **fields: Any) -> Request:
        messages = (Message("user", text),)
        return Request(MODELS[self.name], "be brief", messages, **{"max_tokens": 1000, **fields})


class Desks:
    """Opens desks, and closes them when the test is over."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self._stack = stack

    def __call__(self, script: Script, key: str | None = KEY, **options: Any) -> Desk:
        server = self._stack.enter_context(SERVERS[self.name](script, key))
        slept_s: list[float] = []
        settings = {"url": server.url, "retries": RetryPolicy(max_tries=4), "sleep": slept_s.append, "timeout_s": 20.0}
        provider = self._stack.enter_context(open_provider(self.name, ProviderOptions(**{**settings, **options})))
        return Desk(self.name, server, provider, slept_s)


@pytest.fixture(params=["anthropic", "openai", "relay"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desks]:
    """Return a function that sets up a provider and the server that it asks, for each protocol."""
    with ExitStack() as stack:
        yield Desks(request.param, stack)
