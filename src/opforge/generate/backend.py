"""Backends that have language models write kernels during the run.

They are ``llm``, ``llm-relay`` and ``kernel_agent``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from opforge.backends import BackendOptions
from opforge.backends.directory import assign_operators
from opforge.generate.agent import Agent, GenerationProgress
from opforge.generate.attempts import WriterContext
from opforge.generate.budget import Budget, reopen
from opforge.generate.connection import ProviderOptions, open_provider
from opforge.generate.journal import GenerationSummary, Journal, OperatorResult
from opforge.generate.options import GenerationOptions
from opforge.generate.prices import Prices
from opforge.generate.prompting import Prompts
from opforge.generate.provider import Provider
from opforge.generate.tasks import Task, aten_tasks, custom_tasks
from opforge.generate.transcript import RecordingProvider
from opforge.kernels import Kernel
from opforge.kernels.custom_folder import find_custom_ops
from opforge.runs.generation_context import GenerationContext
from opforge.suites.custom_ops import CustomOpsSuite

REJECTED_FOLDER = "rejected_kernels"
"""Subfolder of a run for the best attempts at operators without a right kernel."""


class GeneratingBackend:
    """Kernels written by a language model during the run.

    The same judge judges them, and the best kernel of each operator is kept.
    """

    name = "llm"

    def __init__(self, options: BackendOptions, provider: Provider | None = None) -> None:
        self._provider = provider
        """Asked instead of the provider that the options name."""
        self._directory = options.ops_directory
        self._custom_root = options.custom_ops_root
        self._options = GenerationOptions.from_json(options.generation or {})
        self.results: tuple[OperatorResult, ...] = ()
        self._tasks: dict[str, Task] = {}
        self.skipped: list[str] = []
        """Messages about folders that hold no operator."""
        self.remarks: list[str] = []
        """Messages about operators without a right kernel, and about users' references."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        written = [self._tasks[kept.name].kernel(Path(kept.file)) for kept in self.results if kept.file]
        matching, _ = assign_operators(written, ops)
        return matching

    def make(self, context: GenerationContext) -> None:
        """Ask the model until every operator has a right kernel or its attempts are spent."""
        options = self._options.checked(context.config.device)
        self._tasks = {task.name: task for task in self._find_tasks(context)}
        journal = Journal(context.folder)
        summary = journal.summary()
        if summary is not None and summary.stopped and summary.bounds != options.spending_limits:
            reopen(journal, summary, context)
            summary = None
        if summary is None:
            summary = self._generate(context, journal, options)
            journal.write_summary(summary)
        self.results = summary.operators
        self.remarks += [remark for kept in self.results if (remark := _remark(kept))]

    def _find_tasks(self, context: GenerationContext) -> list[Task]:
        """Return the kernels to write."""
        if context.suite.name != CustomOpsSuite.name:
            return [*aten_tasks(context.suite)]
        custom_ops = find_custom_ops(self._custom_root)
        work = custom_tasks(custom_ops, context.suite, self.name.replace("-", "_"), self._directory)
        self.skipped, self.remarks = list(custom_ops.skipped), work.remarks
        return [*work.tasks]

    def _generate(self, context: GenerationContext, journal: Journal, options: GenerationOptions) -> GenerationSummary:
        prices = Prices.load(Path(options.prices) if options.prices else None)
        budget = Budget(prices, options.max_cost, options.max_tokens, journal.spent())
        board = GenerationProgress(len(self._tasks), context.progress)
        board.cost = lambda: budget.spent.cost
        started, judged_before = time.monotonic(), context.judge_service.busy_s
        opened = open_configured_provider(options, prices) if self._provider is None else nullcontext(self._provider)
        with opened as provider:
            prompts = Prompts(options.prompts, options.dsl, _machine(context))
            shared = WriterContext(
                provider, budget, context.judge_service, journal, prompts, options, board.report, context.notice
            )
            agent = Agent(shared, board, self._directory, context.folder / REJECTED_FOLDER)
            kept = agent.write_kernels(self._tasks.values())
        return GenerationSummary(
            options.model,
            tuple(kept),
            budget.spent,
            budget.stop_reason,
            options.spending_limits,
            seconds=time.monotonic() - started,
            judging_seconds=context.judge_service.busy_s - judged_before,
            asking_seconds=sum(request.seconds for request in journal.requests()),
        )


class LlmBackend(GeneratingBackend):
    """Kernels by the Claude API (ANTHROPIC_API_KEY), attempt after attempt with feedback; see docs/generation.md."""


class RelayBackend(GeneratingBackend):
    """The same by any server of OpenAI's protocol (--llm-relay-url), a local model's too."""

    name = "llm-relay"


class KernelAgentBackend(GeneratingBackend):
    """Kernels by parallel workers with refinement (OPENAI_API_KEY), the best of all kept."""

    name = "kernel_agent"


@contextmanager
def open_configured_provider(options: GenerationOptions, prices: Prices) -> Iterator[Provider]:
    """Yield the provider to ask, wrapped in a recorder if requested; close it afterwards."""
    transcript = Path(options.transcript) if options.transcript else None
    with open_provider(options.provider, ProviderOptions(options.url, transcript, prices)) as provider:
        if not options.record:
            yield provider
            return
        with RecordingProvider(provider, Path(options.record)) as recorder:
            yield recorder


def _machine(context: GenerationContext) -> dict[str, str | None]:
    """Return the values that prompts use to describe the machine."""
    manifest = context.manifest
    return {"device": manifest.machine.device, "name": manifest.machine.name, **manifest.versions}


def _remark(kept: OperatorResult) -> str:
    if kept.right:
        return ""
    if kept.file is None:
        return f"{kept.name} has no kernel after {kept.attempts} attempts: {kept.explanation}"
    return f"{kept.name}: none of {kept.attempts} attempts is right; the best one is judged ({kept.explanation})"
