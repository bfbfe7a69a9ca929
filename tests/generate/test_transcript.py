"""Transcripts: written as it happens, replayed in order."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from opforge.errors import OpforgeError
from opforge.generate.budget import Budget
from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.prices import Prices
from opforge.generate.provider import Message, ProviderError, Reply, Request, Usage
from opforge.generate.transcript import RecordingProvider, TranscriptProvider, request_digest
from tests.generate.conftest import KEY, Desks
from tests.generate.servers import Cut, Say, Status

REQUEST = Request("m", "be brief", (Message("user", "write relu"),), 100)


def replaying(path: Path) -> TranscriptProvider:
    return TranscriptProvider(ProviderOptions(transcript=path))


def test_what_is_recorded_is_replayed(desk: Desks, tmp_path: Path) -> None:
    at = desk([Say("one ü"), Status(429, retry_after="0"), Cut("two" * 50), Say("two", stop="refusal"), Say("three")])
    path = tmp_path / "new" / "transcript.jsonl"
    asked = [at.request(), at.request(), at.request("write add", temperature=0.5)]
    with RecordingProvider(at.provider, path) as recorder:
        assert recorder.name == at.name
        first = [recorder.ask(request) for request in asked]
    assert [reply.text for reply in first] == ["one ü", "two", "three"]
    with open_provider("transcript", ProviderOptions(transcript=path)) as provider:
        free = [replace(reply, usage=replace(reply.usage, cost=0.0)) for reply in first]
        assert [provider.ask(request) for request in asked] == free
        with pytest.raises(ProviderError, match="2 times, and one more request was made"):
            provider.ask(asked[0])
    assert KEY not in path.read_text()


def test_every_part_of_a_request_tells_it_from_another() -> None:
    others = [
        replace(REQUEST, model="n"),
        replace(REQUEST, system=""),
        replace(REQUEST, messages=(Message("assistant", "write relu"),)),
        replace(REQUEST, max_tokens=101),
        replace(REQUEST, temperature=0.0),
    ]
    assert len({request_digest(request) for request in [REQUEST, *others]}) == 6
    assert request_digest(replace(REQUEST)) == request_digest(REQUEST)


def test_a_request_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"digest": "0" * 64, "reply": {"text": "x"}}) + "\n")
    with pytest.raises(ProviderError, match="no answer to the request") as caught:
        replaying(path).ask(REQUEST)
    assert "'write relu'" in str(caught.value)
    assert "1 replies" in str(caught.value)


def test_a_replay_costs_nothing_and_needs_no_budget(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    usage = {"input_tokens": 3, "output_tokens": 4, "cost": 1.5}
    path.write_text(json.dumps({"digest": request_digest(REQUEST), "reply": {"text": "x", "usage": usage}}) + "\n")
    budget = Budget(Prices.load(), max_cost=1e-6)
    budget.ask(replaying(path), REQUEST)
    assert (budget.spent.tokens, budget.spent.cost, budget.stop_reason) == (7, 0.0, "")


def test_half_a_line_at_the_end_is_passed_over_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = (
        json.dumps({"digest": request_digest(REQUEST), "reply": {"text": "whole", "usage": {"input_tokens": 3}}}) + "\n"
    )
    path.write_text(row + row[:40])
    provider = replaying(path)
    assert provider.ask(REQUEST) == Reply("whole", Usage(3, 0, 0.0), "end")
    with pytest.raises(ProviderError, match="1 times, and one more request was made"):
        provider.ask(REQUEST)
    with RecordingProvider(replaying(path), path) as recorder:
        recorder.ask(REQUEST)
    assert [json.loads(line)["reply"]["text"] for line in path.read_text().splitlines()] == ["whole", "whole"]


@pytest.mark.parametrize("line", ["[]", "{}", "words", '{"digest": "x"}', '{"contains": "x", "reply": {"text": ""}}'])
def test_a_line_that_is_none_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ProviderError, match="line 2 is not a line of a transcript"):
        replaying(path)


def test_lines_by_hand_say_what_a_request_contains(tmp_path: Path) -> None:
    rows = [
        {"contains": ["relu", "brief"], "reply": {"text": "first"}},
        {"contains": ["relu"], "reply": {"text": "second", "stop": "max_tokens"}},
        {"contains": ["add"], "reply": {"text": "never"}},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    provider = replaying(path)
    assert [provider.ask(REQUEST).text for _ in range(2)] == ["first", "second"]
    with pytest.raises(ProviderError, match="no answer"):
        provider.ask(REQUEST)


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    class Echo:
        name = "echo"

        def ask(self, request: Request, waiting: object = None) -> Reply:
            return Reply(request.messages[0].text * 500, Usage(1, 1, None), "end")

    path = tmp_path / "t.jsonl"
    requests = [replace(REQUEST, messages=(Message("user", f"q{n};"),)) for n in range(40)]
    with RecordingProvider(Echo(), path) as recorder, ThreadPoolExecutor(8) as pool:
        list(pool.map(recorder.ask, requests))
    provider = replaying(path)
    assert all(provider.ask(request).text == request.messages[0].text * 500 for request in requests)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="--transcript FILE"):
        TranscriptProvider(ProviderOptions())
    with pytest.raises(ProviderError, match="No such file"):
        replaying(tmp_path / "none.jsonl")
    path = tmp_path / "t.jsonl"
    path.touch()
    with pytest.raises(OpforgeError, match="cannot be written"):
        RecordingProvider(replaying(path), path / "below" / "t.jsonl")
