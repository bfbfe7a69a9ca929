"""Kernels by language models: opforge asks, judges and keeps the best."""

import datetime as dt
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from BackendBench.eval import live_cases, start_server
from opforge.generate import backend as opforge_llm
from opforge.generate.options import GenerationOptions
from opforge.generate.provider import NO_USAGE, Reply, Request, silent
from opforge.runs import RunConfig, run

from .base import Backend
from .directory import DirectoryBackend


class _Client:
    """A client with ``call_llm``, asked as opforge asks its providers."""

    name = "client"

    def __init__(self, client: Any) -> None:
        self._client = client

    def ask(self, request: Request, waiting: Callable[[str], None] = silent) -> Reply:
        del waiting
        prompt = "\n\n".join([request.system, *(message.text for message in request.messages)])
        return Reply(self._client.call_llm(prompt), NO_USAGE, "end")


class LLMBackend(Backend):
    """Kernels by Anthropic's models, or by a client with ``call_llm(prompt)``."""

    writer: type[opforge_llm.GeneratingBackend] = opforge_llm.LlmBackend
    provider = "anthropic"

    def __init__(self, model: str = "claude-opus-5-5", llm_client: Any = None, name: str = "llm") -> None:
        super().__init__(name)
        self.model, self.llm_client = model, llm_client
        stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%d-%H%M%S-%f")
        self.kernels_dir = str(Path("generated_kernels") / f"{name}_run_{stamp}")

    def generate_kernels(
        self, suite: Iterable[Any], attempts: int = 5, dsl: str = "triton", daemon: bool = True
    ) -> None:
        """Have a kernel written for each operator packet of a suite; the right ones are in ``kernels_dir``."""
        del daemon
        self._generate(suite, GenerationOptions(self.provider, self.model, dsl=dsl, rounds=attempts))

    def _generate(self, suite: Iterable[Any], options: GenerationOptions) -> None:
        folder = Path(self.kernels_dir)
        folder.mkdir(parents=True)
        live, device, _ids = live_cases(folder, suite)
        config = RunConfig(
            "given", self.name, device=device, ops_directory=str(folder / "kernels"), generation=options.as_json()
        )
        client = None if self.llm_client is None else _Client(self.llm_client)
        writer = self.writer(config.checked().backend_options, client)
        start_server(device)
        run(config, folder / "run", suite=live.suite(), backend=writer)
        if any(result.right for result in writer.results):
            self.compiled_kernels = DirectoryBackend(folder / "kernels").compiled_kernels


class KernelAgentBackend(LLMBackend):
    """Kernels by OpenAI's models, with parallel workers for each operator."""

    writer = opforge_llm.KernelAgentBackend
    provider = "openai"

    def __init__(self, model: str = "gpt-6.1-sol", llm_client: Any = None) -> None:
        super().__init__(model, llm_client, "kernel_agent")
        self.set_config()

    def set_config(self, num_workers: int = 4, max_rounds: int = 10) -> None:
        """Set the workers for each operator, and the attempts of each worker."""
        self.num_workers, self.max_rounds = num_workers, max_rounds

    def generate_kernels(  # type: ignore[override]
        self, suite: Iterable[Any], attempts: int | None = None, dsl: str = "triton", daemon: bool = True
    ) -> None:
        """Have a kernel written for each operator packet of a suite; the right ones are in ``kernels_dir``."""
        del daemon
        rounds = attempts or self.max_rounds
        self._generate(
            suite,
            GenerationOptions(self.provider, self.model, dsl=dsl, workers=self.num_workers, rounds=rounds, target=1.0),
        )
