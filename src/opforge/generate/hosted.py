"""Providers that are servers, called through their SDKs: Anthropic, OpenAI, and servers with OpenAI's protocol."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar, Self

from opforge.generate.connection import (
    Connections,
    ProviderOptions,
    Scrubber,
    abort,
    check_address,
    read_key,
    redacted_url,
    require_key,
)
from opforge.generate.prices import estimate_tokens
from opforge.generate.provider import NO_USAGE, ProviderError, Reply, Request, Usage, silent
from opforge.generate.retry import SdkErrors, TryFailedError, ask_with_retries

_CONNECT_S = 30.0
_ANTHROPIC_STOPS = {"end_turn": "end", "stop_sequence": "end", "model_context_window_exceeded": "max_tokens"}
_OPENAI_STOPS = {"stop": "end", "length": "max_tokens", "content_filter": "refusal"}
"""Stop reasons of a server that have another name here; the others are the same."""


@dataclass(slots=True)
class PartialReply:
    """A reply that may be incomplete."""

    parts: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    output_tokens: int | None = None
    server_stop: str = ""
    """Why it is about to end, in the server's term."""
    stop: str = ""
    """Why it ended, in opforge's term; empty while it has not."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


class HostedProvider(ABC):
    """A server whose stream is read to its end. The SDK's retries are off; ours are counted and reported."""

    name: str
    sdk_package: ClassVar[str]
    """Package of the SDK; opforge's extra has the same name."""
    client_class: ClassVar[str]
    """The SDK's class of clients."""
    key_variable: ClassVar[str]
    address_variable: ClassVar[str]
    """Environment variable with the server's address, if it is not the provider's own."""

    def __init__(self, options: ProviderOptions) -> None:
        self._options = options
        self._sdk = _sdk(self.sdk_package, self.name)
        url = options.url or os.environ.get(self.address_variable, "")
        if url:
            check_address(url)
        key = self.find_key(url)
        self._scrub = Scrubber(key, url)
        self._sdk_errors = SdkErrors(self._sdk, self._scrub, self.key_variable)
        self._url = redacted_url(url)
        self._connections = Connections()
        self._client = self._make_client(key, url)
        self._closing = threading.Event()
        self._without_temperature: set[str] = set()

    def find_key(self, url: str) -> str:  # noqa: ARG002  # one key for all addresses
        """Return the key for a server; an empty address means the SDK's default."""
        return require_key(self.key_variable, self.name)

    @abstractmethod
    def open_stream(self, request: Request) -> Any:
        """Send a request and return the SDK's stream of events."""

    @abstractmethod
    def add_event(self, partial: PartialReply, event: Any) -> None:
        """Add an event to the partial reply."""

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        """Return the whole reply, or raise ``ProviderError``."""
        sleep = self._options.sleep or self._closing.wait
        return ask_with_retries(
            lambda: self._ask_once(request, waiting), self.name, self._options.retries, waiting, sleep
        )

    def close(self) -> None:
        """Abort requests in flight and close the connections; may be called from any thread."""
        self._closing.set()
        self._connections.abort_all()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url or 'its own server'!r})"

    def _make_client(self, key: str, url: str) -> Any:
        """Return the SDK's client: no retries, a time-out on silence, connections that can be ended."""
        timeout = self._sdk.Timeout(self._options.timeout_s, connect=min(self._options.timeout_s, _CONNECT_S))
        hooks = {"request": [self._connections.on_request]}
        return getattr(self._sdk, self.client_class)(
            api_key=key,
            base_url=url or None,
            max_retries=0,
            timeout=timeout,
            http_client=self._sdk.DefaultHttpxClient(timeout=timeout, event_hooks=hooks),
        )

    def _ask_once(self, request: Request, waiting: Callable[[str], None]) -> Reply:
        """Try once; a model that takes no temperature is asked without it, now and later."""
        if request.temperature is not None and request.model in self._without_temperature:
            request = replace(request, temperature=None)
        reply = self._read(request)
        if isinstance(reply, Reply):
            return reply
        if request.temperature is None or reply.retryable or "temperature" not in str(reply):
            raise reply
        self._without_temperature.add(request.model)
        waiting(f"{self.name}: model {request.model!r} takes no temperature, so none is sent")
        return self._ask_once(request, waiting)

    def _read(self, request: Request) -> Reply | TryFailedError:
        """Return the reply, or why it failed.

        Errors of the SDK hold the key in their request, so they are not passed on.
        """
        if self._closing.is_set():
            return _closed_failure()
        arriving = PartialReply()
        late = False
        try:
            with _TimeLimitedStream(self.open_stream(request), self._options.limit_s) as stream:
                try:
                    for event in stream.events:
                        self.add_event(arriving, event)
                finally:
                    late = stream.timed_out
        except Exception as error:  # of the SDK, of the HTTP library, or of reading an event; unknown ones are raised
            understood = self._sdk_errors.to_failure(error, request.model)
            if understood is None and not self._closing.is_set():
                raise
            failure = understood or _closed_failure()
        else:
            if arriving.stop and not late:
                return Reply(arriving.text, self._usage(request, arriving), arriving.stop)
            failure = TryFailedError("the reply was interrupted", retryable=True)
        if late:
            failure = TryFailedError(f"the reply was not complete after {self._options.limit_s:g} s", retryable=True)
        if self._closing.is_set():
            failure = _closed_failure()
        failure.usage = self._usage(request, arriving) if arriving.parts or arriving.input_tokens else NO_USAGE
        return failure

    def _usage(self, request: Request, arriving: PartialReply) -> Usage:
        """Return the server's token counts.

        If it gave none, because it never does or broke off, they are estimated from the texts.
        """
        texts = (request.system, *(message.text for message in request.messages))
        input_tokens, output_tokens = arriving.input_tokens, arriving.output_tokens
        if input_tokens is None:
            input_tokens = sum(map(estimate_tokens, texts))
        if output_tokens is None or not arriving.stop:
            output_tokens = max(output_tokens or 0, estimate_tokens(arriving.text))
        return self._options.prices.usage(request.model, input_tokens, output_tokens)


class AnthropicProvider(HostedProvider):
    """Claude, with the key in ANTHROPIC_API_KEY."""

    name = "anthropic"
    sdk_package = "anthropic"
    client_class = "Anthropic"
    key_variable = "ANTHROPIC_API_KEY"
    address_variable = "ANTHROPIC_BASE_URL"

    def open_stream(self, request: Request) -> Any:
        options: dict[str, Any] = {"system": request.system} if request.system else {}
        if request.temperature is not None:
            options["extra_body"] = {"temperature": request.temperature}  # only some SDKs accept it as a named argument
        messages = [{"role": m.role, "content": m.text or "(nothing)"} for m in request.messages]  # empty is refused
        return self._client.messages.create(
            model=request.model, max_tokens=request.max_tokens, messages=messages, stream=True, **options
        )

    def add_event(self, partial: PartialReply, event: Any) -> None:
        if event.type == "message_start":
            usage = event.message.usage
            cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
            partial.input_tokens = usage.input_tokens + cached
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            partial.parts.append(event.delta.text)
        elif event.type == "message_delta":
            partial.output_tokens = event.usage.output_tokens
            partial.server_stop = event.delta.stop_reason or "end_turn"
        elif event.type == "message_stop":
            partial.stop = _ANTHROPIC_STOPS.get(partial.server_stop, partial.server_stop)


class OpenAIProvider(HostedProvider):
    """OpenAI's models, with the key in OPENAI_API_KEY."""

    name = "openai"
    sdk_package = "openai"
    client_class = "OpenAI"
    key_variable = "OPENAI_API_KEY"
    address_variable = "OPENAI_BASE_URL"
    reply_limit_parameter: ClassVar[str] = "max_completion_tokens"
    """The protocol's name for the limit on a reply's tokens.

    Newer models take this name only; other servers often take only the older one.
    """

    def open_stream(self, request: Request) -> Any:
        options: dict[str, Any] = {self.reply_limit_parameter: request.max_tokens}
        if request.temperature is not None:
            options["temperature"] = request.temperature
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, *({"role": m.role, "content": m.text or "(nothing)"} for m in request.messages)]
        return self._client.chat.completions.create(
            model=request.model, messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )

    def add_event(self, partial: PartialReply, event: Any) -> None:
        if event.usage is not None:
            partial.input_tokens, partial.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices or ():
            if choice.delta is not None and (text := choice.delta.content or choice.delta.refusal):
                partial.parts.append(text)
                partial.server_stop = partial.server_stop or ("refusal" if choice.delta.refusal else "")
            if choice.finish_reason:
                partial.stop = partial.server_stop or _OPENAI_STOPS.get(choice.finish_reason, choice.finish_reason)


class RelayProvider(OpenAIProvider):
    """Any server with OpenAI's protocol, by its address (--llm-relay-url or OPENAI_BASE_URL); a key is optional."""

    name = "relay"
    key_variable = "OPFORGE_RELAY_API_KEY"
    reply_limit_parameter = "max_tokens"

    def find_key(self, url: str) -> str:
        """Return the relay's key.

        A key for OpenAI is sent only to the address in OPENAI_BASE_URL, never to another one.
        """
        if not url:
            raise ProviderError(
                "provider 'relay' needs the address of a server; "
                "give --llm-relay-url URL, or export OPENAI_BASE_URL (such as http://localhost:8000/v1)"
            )
        paired = url == os.environ.get(self.address_variable)
        key = read_key(self.key_variable) or (read_key(OpenAIProvider.key_variable) if paired else "")
        return key or "no-key"  # the SDK needs one, and servers without keys accept any


class _TimeLimitedStream:
    """A stream that is closed when it takes too long.

    The time-out does not catch a server that sends only keep-alive signals.
    """

    def __init__(self, events: Any, limit_s: float) -> None:
        self.events = events
        self.timed_out = False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.events.close()

    def _end(self) -> None:
        self.timed_out = True
        if (network := self.events.response.extensions.get("network_stream")) is not None:
            abort(network)


def _closed_failure() -> TryFailedError:
    return TryFailedError("interrupted, because the provider was closed", retryable=False)


def _sdk(package: str, name: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ProviderError(
            f"provider {name!r} needs the package {package!r}, which cannot be imported ({error}); "
            f"`pip install opforge[{package}]`"
        ) from None
