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
from opforge.backends.directory import matched
from opforge.generate.agent import Agent, Board, Kept
from opforge.generate.assignment import assignments
from opforge.generate.attempts import Means
from opforge.generate.budget import Budget, Spent
from opforge.generate.custom import Task, custom_work
from opforge.generate.finding import open_provider
from opforge.generate.journal import Journal
from opforge.generate.options import GenerationOptions
from opforge.generate.prices import Prices
from opforge.generate.prompting import Prompts
from opforge.generate.provider import Provider
from opforge.generate.raising import reopen
from opforge.generate.settings import ProviderOptions
from opforge.generate.transcript import Recorder
from opforge.kernels import Kernel
from opforge.kernels.custom import find
from opforge.runs.workshop import Workshop
from opforge.suites.custom_ops import CustomOpsSuite

REJECTED = "rejected_kernels"
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
        self._kept: list[Kept] = []
        self._tasks: dict[str, Task] = {}
        self.strangers: list[str] = []
        """Messages about folders that hold no operator."""
        self.remarks: list[str] = []
        """Messages about operators without a right kernel, and about users' references."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        written = [self._tasks[kept.name].kernel(Path(kept.file)) for kept in self._kept if kept.file]
        matching, _ = matched(written, ops)
        return matching

    def make(self, workshop: Workshop) -> None:
        """Ask the model until every operator has a right kernel or its attempts are spent."""
        options = self._options.checked(workshop.config.device)
        self._tasks = {task.name: task for task in self._wanted(workshop)}
        journal = Journal(workshop.folder)
        summary = journal.summary()
        if summary is not None and summary["stopped"] and summary.get("bounds") != options.bounds:
            reopen(journal, summary, workshop)
            summary = None
        if summary is None:
            summary = self._made(workshop, journal, options)
            journal.write_summary(summary)
        self._kept = [Kept.from_json(name, row) for name, row in summary["operators"].items()]
        self.remarks += [remark for kept in self._kept if (remark := _remark(kept))]

    def _wanted(self, workshop: Workshop) -> list[Task]:
        """Return the kernels to write."""
        if workshop.suite.name != CustomOpsSuite.name:
            return [*assignments(workshop.suite)]
        custom_ops = find(self._custom_root)
        work = custom_work(custom_ops, workshop.suite, self.name.replace("-", "_"), self._directory)
        self.strangers, self.remarks = list(custom_ops.strangers), work.remarks
        return [*work.tasks]

    def _made(self, workshop: Workshop, journal: Journal, options: GenerationOptions) -> dict[str, Any]:
        prices = Prices.known(Path(options.prices) if options.prices else None)
        budget = Budget(prices, options.max_cost, options.max_tokens, journal.spent())
        board = Board(len(self._tasks), workshop.progress)
        board.cost = lambda: budget.spent.cost
        started, judged_before = time.monotonic(), workshop.judging.busy_s
        with provider_of(options, prices) as provider:
            prompts = Prompts(options.prompts, options.dsl, _machine(workshop))
            means = Means(provider, budget, workshop.judging, journal, prompts, options, board.tell)
            kept = Agent(means, board, self._directory, workshop.folder / REJECTED).make(self._tasks.values())
        return {
            "model": options.model,
            "operators": {k.name: k.as_json() for k in kept},
            "right": sum(1 for k in kept if k.right),
            "attempts": sum(k.attempts for k in kept),
            **_spent_row(budget.spent),
            "stopped": budget.reason,
            "bounds": options.bounds,
            "seconds": round(time.monotonic() - started, 3),
            "judging_seconds": round(workshop.judging.busy_s - judged_before, 3),
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
def provider_of(options: GenerationOptions, prices: Prices) -> Iterator[Provider]:
    """Yield the provider to ask, wrapped in a recorder if requested; close it afterwards."""
    transcript = Path(options.transcript) if options.transcript else None
    with open_provider(options.provider, ProviderOptions(options.url, transcript, prices)) as provider:
        if not options.record:
            yield provider
            return
        with Recorder(provider, Path(options.record)) as recorder:
            yield recorder


def _machine(workshop: Workshop) -> dict[str, Any]:
    """Return the values that prompts use to describe the machine."""
    machine, versions = workshop.manifest["machine"], workshop.manifest["versions"]
    return {"device": machine["device"], "name": machine["name"], **versions}


def _spent_row(spent: Spent) -> dict[str, Any]:
    return {
        "requests": spent.requests,
        "input_tokens": spent.input_tokens,
        "output_tokens": spent.output_tokens,
        "cost": round(spent.cost, 6),
        "unpriced": spent.unpriced,
    }


def _remark(kept: Kept) -> str:
    if kept.right:
        return ""
    if kept.file is None:
        return f"{kept.name} has no kernel after {kept.attempts} attempts: {kept.words}"
    return f"{kept.name}: none of {kept.attempts} attempts is right; judged is the best of them ({kept.words})"
