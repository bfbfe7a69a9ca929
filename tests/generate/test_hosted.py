"""The real SDKs against loopback servers: what comes, what is tried again, and what is never said."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat

import pytest

from opforge.errors import OpforgeError
from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.hosted import RelayProvider
from opforge.generate.provider import Message, MissingKeyError, ProviderError, Request
from opforge.generate.retry import RetryPolicy
from opforge.sandbox.guard.secret_names import looks_secret
from tests.generate.conftest import KEY, MODELS, Desk, Desks
from tests.generate.servers import AnthropicServer, Cut, Drop, Fail, Hang, ModelServer, OpenAIServer, Say, Status, Step

LONG = "def relu_kernel_impl(x):\n    return x.clamp(min=0)\n" * 40


def final(desk: Desk, **fields: object) -> ProviderError:
    """Ask, and return the error that it ends in."""
    with pytest.raises(ProviderError) as caught:
        desk.provider.ask(desk.request(**fields))
    return caught.value


def test_a_reply_comes_whole_with_its_figures(desk: Desks) -> None:
    at = desk([Say(LONG, input_tokens=1200, output_tokens=345)])
    reply = at.provider.ask(at.request(temperature=0.5))
    assert (reply.text, reply.stop) == (LONG, "end")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (1200, 345)
    prices = {"anthropic": (2.0, 10.0), "openai": (1.25, 10.0)}
    if at.name == "relay":
        assert reply.usage.cost is None
    else:
        price = prices[at.name]
        assert reply.usage.cost == pytest.approx((1200 * price[0] + 345 * price[1]) / 1e6)
    body = at.server.requests[0].body
    assert (body["model"], body["stream"], body["temperature"]) == (MODELS[at.name], True, 0.5)
    assert body["max_completion_tokens" if at.name == "openai" else "max_tokens"] == 1000
    assert at.server.requests[0].text == "write relu"
    assert "be brief" in (body["system"] if at.name == "anthropic" else body["messages"][0]["content"])


def test_turns_are_sent_in_order_and_an_empty_one_is_not_sent_empty(desk: Desks) -> None:
    at = desk([Say("yes")])
    turns = (Message("user", "one"), Message("assistant", ""), Message("user", "three"))
    at.provider.ask(Request(MODELS[at.name], "", turns, 10))
    sent = [(m["role"], m["content"]) for m in at.server.requests[0].body["messages"]]
    assert sent == [("user", "one"), ("assistant", "(nothing)"), ("user", "three")]


STOPS = {
    "anthropic": {"end_turn": "end", "max_tokens": "max_tokens", "refusal": "refusal", "pause_turn": "pause_turn"},
    "openai": {"stop": "end", "length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_calls"},
}


def test_why_a_reply_ended(desk: Desks) -> None:
    words = STOPS["anthropic" if desk.name == "anthropic" else "openai"]
    at = desk([Say("half a ker", stop=word) for word in words])
    assert [at.provider.ask(at.request()).stop for _ in words] == list(words.values())


def test_a_rate_limit_is_waited_for_as_long_as_asked(desk: Desks) -> None:
    heard: list[str] = []
    at = desk([Status(429, "slow down", retry_after="7"), Status(429, retry_after="9999"), Say("at last")])
    assert at.provider.ask(at.request(), heard.append).text == "at last"
    assert 7 <= at.slept_s[0] <= 7 * 1.25
    assert 120 <= at.slept_s[1] <= 120 * 1.25
    assert len(heard) == 2
    assert heard[0].startswith(f"{at.name}: status 429: slow down; trying again in")
    assert "1 of 4 tries" in heard[0]


def test_server_errors_are_tried_again_until_the_tries_are_spent(desk: Desks) -> None:
    statuses = (500, 503, 529, 408)
    at = desk([Status(status, "out of order") for status in statuses for _ in range(4)])
    for status in statuses:
        at.slept_s.clear()
        error = final(at)
        assert f"status {status}: out of order (tried 4 times)" in str(error)
        assert [low <= s <= 2 * low for s, low in zip(at.slept_s, (0.5, 1, 2), strict=True)] == [True] * 3
        assert error.usage.input_tokens == 0
    assert len(at.server.requests) == 16


def test_what_no_try_mends_is_final_at_once(desk: Desks) -> None:
    statuses = (400, 401, 403, 404, 413)
    at = desk([Status(status, "no") for status in statuses])
    for status in statuses:
        assert f"status {status}: no" in str(final(at))
    assert len(at.server.requests) == 5
    assert at.slept_s == []


CUTS: list[Step] = [Cut(LONG), Cut(LONG, reset=True), Cut(LONG, clean=True), Fail(LONG), Drop()]


def test_half_a_reply_is_not_taken_for_a_whole_one(desk: Desks) -> None:
    whole = Say("whole", input_tokens=10, output_tokens=5)
    at = desk([each for step in CUTS for each in (step, whole)])
    for step in CUTS:
        reply = at.provider.ask(at.request())
        assert (reply.text, reply.stop) == ("whole", "end"), step
        if isinstance(step, Cut) and step.reset:
            continue  # a reset throws away what came
        if isinstance(step, Drop):
            assert reply.usage.output_tokens == 5
        else:  # what came of the first try was paid for
            assert reply.usage.output_tokens == pytest.approx(5 + len(LONG) / 8, abs=2), step
        if isinstance(step, Cut) and at.name == "anthropic":
            assert reply.usage.input_tokens == 110
    assert len(at.server.requests) == 2 * len(CUTS)


@pytest.mark.parametrize("server, name", [(AnthropicServer, "anthropic"), (OpenAIServer, "openai")])
def test_what_is_not_the_protocol_is_tried_again(server: type[ModelServer], name: str) -> None:
    class Garbling(server):  # type: ignore[valid-type, misc]
        def error_event(self, fail: Fail) -> str:
            return "event: content_block_delta\ndata: {half of an obj\n\n"

    heard: list[str] = []
    with (
        Garbling([Fail(LONG), Say("clear")]) as garbling,
        open_provider(name, ProviderOptions(url=garbling.url, sleep=lambda _s: None)) as provider,
    ):
        reply = provider.ask(Request("m", "", (Message("user", "hi"),), 10), heard.append)
    assert reply.text == "clear"
    assert "does not follow the protocol" in heard[0]


def test_cut_every_time(desk: Desks) -> None:
    at = desk(repeat(Cut(LONG)))
    error = final(at)
    assert "interrupted" in str(error) or "no connection" in str(error)
    assert "tried 4 times" in str(error)
    assert error.usage.output_tokens == pytest.approx(4 * len(LONG) / 8, abs=8)


def test_a_server_that_is_silent_is_left(desk: Desks) -> None:
    at = desk(chain([Hang(), Hang(LONG)], repeat(Say("awake"))), timeout_s=0.5, retries=RetryPolicy(max_tries=20))
    heard: list[str] = []
    assert at.provider.ask(at.request(), heard.append).text == "awake"
    assert all("no answer in time" in words for words in heard[:2])


def test_signs_of_life_are_no_reply(desk: Desks) -> None:
    at = desk(chain([Hang(LONG, drip_s=0.05)], repeat(Say("awake"))), limit_s=0.5, retries=RetryPolicy(max_tries=20))
    heard: list[str] = []
    assert at.provider.ask(at.request(), heard.append).text == "awake"
    assert "not complete after 0.5 s" in heard[0]


def test_nobody_listens(desk: Desks) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        error = final(desk([], url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1"))
    assert "no connection" in str(error)
    assert "refused" in str(error)
    assert "tried 4 times" in str(error)


def test_a_key_is_never_said(desk: Desks) -> None:
    at = desk(repeat(Say("")), key="another")  # the server says in its error which key it was given
    error = final(at)
    assert "status 401: invalid key: [key]" in str(error)
    assert "API_KEY" in str(error)
    seen: BaseException | None = error
    while seen is not None:
        assert KEY not in f"{seen!s}{seen!r}{vars(seen)}"
        seen = seen.__cause__ or seen.__context__
    assert KEY not in repr(at.provider)
    assert at.server.requests[0].key == KEY


def test_a_masked_key_is_not_said_either(desk: Desks) -> None:
    at = desk([Status(401, "Incorrect API key provided: sk-te***************Zc6Y.")])
    assert "sk-te" not in str(final(at))


def test_keys_are_kept_out_of_the_sandbox() -> None:
    assert all(looks_secret(name) for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", RelayProvider.key_variable))


def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("anthropic", "openai"):
        variable = f"{name.upper()}_API_KEY"
        monkeypatch.delenv(variable)
        with pytest.raises(MissingKeyError, match=variable), open_provider(name):
            pass
        monkeypatch.setenv(variable, "sk-with a space")
        with pytest.raises(MissingKeyError) as caught, open_provider(name):
            pass
        assert "sk-with" not in str(caught.value)


def test_a_relay_gets_openais_key_only_where_its_address_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPFORGE_RELAY_API_KEY")
    with OpenAIServer(repeat(Say("yes"))) as server:
        request = Request("m", "", (Message("user", "hi"),), 10)
        with open_provider("relay", ProviderOptions(url=server.url)) as provider:
            provider.ask(request)
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        with open_provider("relay") as provider:
            provider.ask(request)
        assert [seen.key for seen in server.requests] == ["no-key", KEY]


def test_the_environment_may_name_the_server(desk: Desks, monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk([Say("yes")])
    variable = "ANTHROPIC_BASE_URL" if at.name == "anthropic" else "OPENAI_BASE_URL"
    monkeypatch.setenv(variable, at.server.url)
    with open_provider(at.name) as provider:
        assert provider.ask(at.request()).text == "yes"
    monkeypatch.setenv(variable, "localhost")
    with pytest.raises(OpforgeError, match="'localhost' is not the address"), open_provider(at.name):
        pass


def test_a_password_in_an_address_is_not_said(desk: Desks) -> None:
    at = desk([])
    at = desk([], url=at.server.url.replace("//", "//me:pa55word@"))
    error = final(at)
    assert "pa55word" not in f"{error}{at.provider!r}"
    with pytest.raises(OpforgeError, match="is not the address") as caught:
        ProviderOptions(url="ftp://me:pa55word@host/v1")
    assert "pa55word" not in str(caught.value)


def test_a_relay_wants_an_address() -> None:
    with pytest.raises(ProviderError, match="--llm-relay-url"):
        RelayProvider(ProviderOptions())


def test_figures_are_estimated_where_a_server_gives_none() -> None:
    with OpenAIServer([Say("x" * 400, usage=False)]) as server:
        with open_provider("relay", ProviderOptions(url=server.url)) as provider:
            reply = provider.ask(Request("m", "", (Message("user", "y" * 40),), 10))
        assert (reply.usage.input_tokens, reply.usage.output_tokens) == (10, 100)


def test_a_model_without_temperature_is_asked_without(desk: Desks) -> None:
    heard: list[str] = []
    at = desk(lambda seen: Status(400, "temperature is not supported") if "temperature" in seen.body else Say("yes"))
    for _ in range(2):
        assert at.provider.ask(at.request(temperature=0.7), heard.append).text == "yes"
    assert ["temperature" in seen.body for seen in at.server.requests] == [True, False, False]
    assert len(heard) == 1
    assert "takes no temperature" in heard[0]


def test_an_account_without_credit_is_not_asked_again() -> None:
    body = {"error": {"message": "You exceeded your quota", "type": "insufficient_quota", "code": "insufficient_quota"}}

    class Poor(OpenAIServer):
        def error_body(self, status: int, message: str) -> dict[str, object]:
            return dict(body)

    with Poor(repeat(Status(429))) as server:
        with (
            open_provider("openai", ProviderOptions(url=server.url)) as provider,
            pytest.raises(ProviderError, match="no credit"),
        ):
            provider.ask(Request("gpt-5", "", (Message("user", "hi"),), 10))
        assert len(server.requests) == 1


def test_many_threads_ask_one_provider(desk: Desks) -> None:
    at = desk(lambda seen: Say(f"reply to {seen.text}"))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: at.provider.ask(at.request(f"q{n}")).text, range(40)))
    assert replies == [f"reply to q{n}" for n in range(40)]


@pytest.mark.parametrize("step", [Hang(), Hang(LONG), Hang(LONG, drip_s=0.05)], ids=["silent", "half", "alive"])
def test_closing_breaks_off_what_is_on_its_way(desk: Desks, step: Step) -> None:
    reached = threading.Event()

    def script(_seen: object) -> Step:
        reached.set()
        return step

    at = desk(script, sleep=None, timeout_s=600)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(at.provider.ask, at.request())
        assert reached.wait(60)
        at.provider.close()
        with pytest.raises(ProviderError, match="interrupted"):
            asked.result(60)


def test_closing_ends_a_wait() -> None:
    waits = threading.Event()
    with OpenAIServer(repeat(Status(429, retry_after="100"))) as server, ThreadPoolExecutor(1) as pool:
        with open_provider("relay", ProviderOptions(url=server.url)) as provider:
            request = Request("m", "", (Message("user", "hi"),), 10)
            asked = pool.submit(provider.ask, request, lambda _text: waits.set())
            assert waits.wait(60)
        with pytest.raises(ProviderError, match="interrupted"):
            asked.result(60)


def test_no_sdk_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, opforge.cli.main, opforge.generate.hosted, opforge.generate.connection\n"
        "print([name for name in ('anthropic', 'openai', 'httpx', 'httpx2', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_sdk_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ProviderError, match=r"pip install opforge\[anthropic\]"), open_provider("anthropic"):
        pass


def test_an_address_that_is_none() -> None:
    for url in ("localhost:8000", "ftp://host/", "http://", "http://host:99999"):
        with pytest.raises(OpforgeError, match="is not the address"):
            ProviderOptions(url=url)
