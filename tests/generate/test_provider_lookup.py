"""Providers by name, ours and other people's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from opforge import registry
from opforge.cli.main import call
from opforge.errors import UnknownNameError
from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.provider import Message, Reply, Request, Usage

ROOT = Path(__file__).resolve().parents[2]


class Parrot:
    """Says what it hears."""

    name = "parrot"
    closed = False

    def __init__(self, options: ProviderOptions) -> None:
        self.options = options

    def ask(self, request: Request, waiting: object = None) -> Reply:
        return Reply(request.messages[-1].text, Usage(1, 1, 0.0), "end")

    def close(self) -> None:
        Parrot.closed = True


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Parrot, "closed", False)
    monkeypatch.setitem(registry.BUILTIN["providers"], "parrot", f"{__name__}:Parrot")
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


def test_ours_are_registered_for_others_as_they_are_for_us() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared["opforge.providers"] == registry.BUILTIN["providers"]


def test_another_persons_provider_is_found_and_closed(parrot: None, capsys: pytest.CaptureFixture[str]) -> None:
    with open_provider("parrot") as provider:
        assert provider.ask(Request("m", "", (Message("user", "hello"),), 1)).text == "hello"
        assert not Parrot.closed
    assert Parrot.closed
    assert call(["ls", "providers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["anthropic", "openai", "parrot", "relay", "transcript"]


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'anthropic'"), open_provider("antropic"):
        pass
