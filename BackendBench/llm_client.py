"""Clients of language models, as ``LLMBackend`` takes them: anything with ``call_llm(prompt)``."""

from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.provider import Message, Request

_REPLY_TOKENS = 16384


class LLMKernelGenerator:
    """Anthropic's models; the key is in ANTHROPIC_API_KEY."""

    provider = "anthropic"
    url = ""

    def __init__(self, model: str = "claude-opus-5-5") -> None:
        self.model = model

    def call_llm(self, prompt: str) -> str:
        """Return the reply to a prompt."""
        request = Request(self.model, "", (Message("user", prompt),), _REPLY_TOKENS)
        with open_provider(self.provider, ProviderOptions(self.url)) as provider:
            return provider.ask(request).text


class LLMRelayKernelGenerator(LLMKernelGenerator):
    """Any server with OpenAI's protocol."""

    provider = "relay"

    def __init__(self, model: str, url: str) -> None:
        super().__init__(model)
        self.url = url
