"""The loopback servers, spoken to by hand."""

from __future__ import annotations

import http.client
import json
from itertools import repeat
from urllib.parse import urlsplit

import pytest

from tests.generate.servers import AnthropicServer, Cut, ModelServer, OpenAIServer, Say, Status

ANTHROPIC = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
OPENAI = {"authorization": "Bearer k"}
QUESTION = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


def post(server: ModelServer, headers: dict[str, str], **more: object) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request("POST", server.path, json.dumps({**QUESTION, **more}), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_anthropic_whole_and_streamed() -> None:
    with AnthropicServer([Say("x" * 60, output_tokens=7)] * 2) as server:
        _, _, whole = post(server, ANTHROPIC)
        assert json.loads(whole)["content"] == [{"type": "text", "text": "x" * 60}]
        _, headers, stream = post(server, ANTHROPIC, stream=True)
        assert headers["content-type"].startswith("text/event-stream")
        kinds = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event: ")]
        deltas = ["content_block_delta"] * 3
        opening = ["message_start", "content_block_start", "ping"]
        assert kinds == [*opening, *deltas, "content_block_stop", "message_delta", "message_stop"]
        assert [seen.text for seen in server.requests] == ["hello", "hello"]


def test_openai_whole_and_streamed() -> None:
    with OpenAIServer([Say("x" * 30, 5, 7)] * 2) as server:
        _, _, whole = post(server, OPENAI)
        assert json.loads(whole)["choices"][0]["message"]["content"] == "x" * 30
        _, _, stream = post(server, OPENAI, stream=True, stream_options={"include_usage": True})
        lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert chunks[-1]["usage"]["total_tokens"] == 12
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "x" * 30


def test_a_script_has_errors_and_an_end() -> None:
    with AnthropicServer([Status(429, retry_after="3")]) as server:
        status, headers, body = post(server, ANTHROPIC)
        assert (status, headers["retry-after"], json.loads(body)["error"]["type"]) == (429, "3", "rate_limit_error")
        status, _, body = post(server, ANTHROPIC)
        assert status == 400
        assert "at its end" in body


def test_what_the_real_one_refuses_is_refused() -> None:
    with AnthropicServer(repeat(Say("")), key="right") as server:
        assert post(server, {**ANTHROPIC, "x-api-key": "wrong"})[0] == 401
        assert post(server, {**ANTHROPIC, "x-api-key": "right"}, messages=[{"role": "system", "content": ""}])[0] == 400
        assert post(server, {**ANTHROPIC, "x-api-key": "right"})[0] == 200


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_is_seen(reset: bool) -> None:
    with (
        OpenAIServer([Cut("x" * 60, reset=reset)]) as server,
        pytest.raises((http.client.IncompleteRead, ConnectionResetError)),
    ):
        post(server, OPENAI, stream=True)
