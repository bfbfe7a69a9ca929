"""Provider for Anthropic models, using the Anthropic SDK."""

from __future__ import annotations

from typing import Any

from opforge.generate.hosted import HostedProvider, PartialReply
from opforge.generate.keys import require_key
from opforge.generate.provider import Request

_STOPS = {"end_turn": "end", "stop_sequence": "end", "model_context_window_exceeded": "max_tokens"}
"""Anthropic stop reasons with another name here; the others are the same."""


class AnthropicProvider(HostedProvider):
    """Claude, with the key in ANTHROPIC_API_KEY."""

    name = "anthropic"
    sdk_package = "anthropic"
    key_variable = "ANTHROPIC_API_KEY"
    address_variable = "ANTHROPIC_BASE_URL"

    def find_key(self, url: str) -> str:  # noqa: ARG002  # one key for all addresses
        return require_key(self.key_variable, self.name)

    def make_client(self, sdk: Any, key: str, url: str) -> Any:
        return sdk.Anthropic(api_key=key, base_url=url or None, **self.client_options(sdk))

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
            partial.stop = _STOPS.get(partial.server_stop, partial.server_stop)
