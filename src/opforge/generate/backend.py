"""Backends that have language models write kernels during the run.

They are ``llm``, ``llm-relay`` and ``kernel_agent``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opforge.backends import BackendOptions
from opforge.backends.directory import assign_operators
from opforge.generate.agent import Agent, GenerationProgress, OperatorResult
from opforge.generate.attempts import WriterContext
from opforge.generate.budget import Budget, Spent
from opforge.generate.custom_tasks import Task, custom_tasks
from opforge.generate.journal import Journal
from opforge.generate.options import GenerationOptions
from opforge.generate.prices import Prices
from opforge.generate.prompting import Prompts
from opforge.generate.provider import Provider
from opforge.generate.provider_lookup import open_provider
from opforge.generate.provider_options import ProviderOptions
from opforge.generate.raise_budget import reopen
from opforge.generate.tasks import aten_tasks
from opforge.generate.transcript import RecordingProvider
from opforge.kernels import Kernel
from opforge.kernels.custom import find_custom_ops
from opforge.runs.generation import GenerationContext
from opforge.suites.custom_ops import CustomOpsSuite

REJECTED_FOLDER = "rejected_kernels"
"""Subfolder of a run for the best attempts at operators without a right kernel."""


class GeneratingBackend:
    """Kernels written by a language model during the run.

    The same judge judges them, and the best kernel of each operator is kept.
    """

    name = "llm"

    def __init__(self, options: BackendOptions) -> None:
        self._directory = options.ops_directory
        self._custom_root = options.custom_ops_root
        self._options = GenerationOptions.from_json(options.generation or {})
        self._results: list[OperatorResult] = []
        self._tasks: dict[str, Task] = {}
        self.strangers: list[str] = []
        """Messages about folders that hold no operator."""
        self.remarks: list[str] = []
        """Messages about operators without a right kernel, and about users' references."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        written = [self._tasks[kept.name].kernel(Path(kept.file)) for kept in self._results if kept.file]
        matching, _ = assign_operators(written, ops)
        return matching

    def make(self, workshop: GenerationContext) -> None:
        """Ask the model until every operator has a right kernel or its attempts are spent."""
        options = self._options.checked(workshop.config.device)
        self._tasks = {task.name: task for task in self._find_tasks(workshop)}
        journal = Journal(workshop.folder)
        summary = journal.summary()
        if summary is not None and summary["stopped"] and summary.get("bounds") != options.spending_limits:
            reopen(journal, summary, workshop)
            summary = None
        if summary is None:
            summary = self._generate(workshop, journal, options)
            journal.write_summary(summary)
        self._results = [OperatorResult.from_json(name, row) for name, row in summary["operators"].items()]
        self.remarks += [remark for kept in self._results if (remark := _remark(kept))]

    def _find_tasks(self, workshop: GenerationContext) -> list[Task]:
        """Return the kernels to write."""
        if workshop.suite.name != CustomOpsSuite.name:
            return [*aten_tasks(workshop.suite)]
        custom_ops = find_custom_ops(self._custom_root)
        work = custom_tasks(custom_ops, workshop.suite, self.name.replace("-", "_"), self._directory)
        self.strangers, self.remarks = list(custom_ops.skipped), work.remarks
        return [*work.tasks]

    def _generate(self, workshop: GenerationContext, journal: Journal, options: GenerationOptions) -> dict[str, Any]:
        prices = Prices.load(Path(options.prices) if options.prices else None)
        budget = Budget(prices, options.max_cost, options.max_tokens, journal.spent())
        board = GenerationProgress(len(self._tasks), workshop.progress)
        board.cost = lambda: budget.spent.cost
        started, judged_before = time.monotonic(), workshop.judge_service.busy_s
        with open_configured_provider(options, prices) as provider:
            prompts = Prompts(options.prompts, options.dsl, _machine(workshop))
            means = WriterContext(provider, budget, workshop.judge_service, journal, prompts, options, board.report)
            kept = Agent(means, board, self._directory, workshop.folder / REJECTED_FOLDER).write_kernels(
                self._tasks.values()
            )
        return {
            "model": options.model,
            "operators": {k.name: k.as_json() for k in kept},
            "right": sum(1 for k in kept if k.right),
            "attempts": sum(k.attempts for k in kept),
            **_spent_row(budget.spent),
            "stopped": budget.stop_reason,
            "bounds": options.spending_limits,
            "seconds": round(time.monotonic() - started, 3),
            "judging_seconds": round(workshop.judge_service.busy_s - judged_before, 3),
            "asking_seconds": round(sum(row.get("seconds", 0.0) for row in journal.requests()), 3),
        }


class LlmBackend(GeneratingBackend):
    """Kernels by the Claude API (ANTHROPIC_API_KEY), attempt after attempt with what the judge says; see docs/generation.md."""


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


def _machine(workshop: GenerationContext) -> dict[str, Any]:
    """Return the values that prompts use to describe the machine."""
    manifest = workshop.manifest
    return {"device": manifest.machine.device, "name": manifest.machine.name, **manifest.versions}


def _spent_row(spent: Spent) -> dict[str, Any]:
    return {
        "requests": spent.requests,
        "input_tokens": spent.input_tokens,
        "output_tokens": spent.output_tokens,
        "cost": round(spent.cost, 6),
        "unpriced": spent.unpriced,
    }


def _remark(kept: OperatorResult) -> str:
    if kept.right:
        return ""
    if kept.file is None:
        return f"{kept.name} has no kernel after {kept.attempts} attempts: {kept.explanation}"
    return f"{kept.name}: none of {kept.attempts} attempts is right; the best one is judged ({kept.explanation})"
