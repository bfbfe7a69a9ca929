"""Provider for OpenAI models, using the OpenAI SDK, and for servers with the same protocol."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from opforge.generate.hosted import HostedProvider, PartialReply
from opforge.generate.keys import read_key, require_key
from opforge.generate.provider import ProviderError, Request

_STOPS = {"stop": "end", "length": "max_tokens", "content_filter": "refusal"}


class OpenAIProvider(HostedProvider):
    """OpenAI's models, with the key in OPENAI_API_KEY."""

    name = "openai"
    sdk_package = "openai"
    key_variable = "OPENAI_API_KEY"
    address_variable = "OPENAI_BASE_URL"
    reply_limit_parameter: ClassVar[str] = "max_completion_tokens"
    """The protocol's name for the limit on a reply's tokens.

    Newer models take this name only; other servers often take only the older one.
    """

    def find_key(self, url: str) -> str:  # noqa: ARG002  # one key for all addresses
        return require_key(self.key_variable, self.name)

    def make_client(self, sdk: Any, key: str, url: str) -> Any:
        return sdk.OpenAI(api_key=key, base_url=url or None, **self.client_options(sdk))

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
                partial.stop = partial.server_stop or _STOPS.get(choice.finish_reason, choice.finish_reason)


class RelayProvider(OpenAIProvider):
    """Any server that speaks OpenAI's protocol, by its address (--llm-relay-url or OPENAI_BASE_URL); a key is optional."""

    name = "relay"
    key_variable = "OPFORGE_RELAY_API_KEY"
    reply_limit_parameter = "max_tokens"

    def find_key(self, url: str) -> str:
        """Return the relay's key.

        A key for OpenAI is sent only to the address in OPENAI_BASE_URL, never to another one.
        """
        if not url:
            raise ProviderError(
                "provider 'relay' needs the address of a server; give --llm-relay-url URL, or export OPENAI_BASE_URL (such as http://localhost:8000/v1)"
            )
        paired = url == os.environ.get(self.address_variable)
        key = read_key(self.key_variable) or (read_key(OpenAIProvider.key_variable) if paired else "")
        return key or "no-key"  # the SDK needs one, and servers without keys accept any
