"""The judge's handle on a process that runs a model. Its replies are validated before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.cases.encoding import TORCH_DTYPES
from opforge.cases.materialise import Bytes
from opforge.judge.replies import FORGED
from opforge.judge.verdict import Outcome
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.models.target import Target
from opforge.sandbox.client import Spawner
from opforge.sandbox.confinement import Room

_MAX_CHUNK_BYTES = 256 << 20
_MOST_WORDS = 1000


class ModelError(Exception):
    """A model's process failed to do a request.

    Carries the verdict, and the running kernel if the process died.
    """

    def __init__(self, outcome: Outcome, reason: str, kernel: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.kernel = kernel


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make and run a model."""

    target: Target
    dtype: str
    """A short name; empty for the model's own."""
    train: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Tally:
    """The calls of a kernel for one operator in a run."""

    kernel: str
    op: str
    answered: int
    fallbacks: Mapping[str, int]
    raised: str


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor of a run, as described by its process."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class ModelProcess:
    """A model in its own process, with or without kernels."""

    worker: KernelWorker
    config: WorkerConfig
    kernels: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    """Forbidden things done or tried in the process."""
    results: dict[str, Result] = field(default_factory=dict)
    tallies: list[Tally] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, spawner: Spawner, config: WorkerConfig, room: Room | None) -> ModelProcess:
        return cls(KernelWorker(spawner, config, room, role="model"), config)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a reply; raises ModelError if the process died, raised, or sent a forged reply."""
        try:
            reply = self.worker.ask(request)
        except DeathError as death:
            running = self.kernels[death.index - 1] if 0 < death.index <= len(self.kernels) else ""
            reason = str(death).replace("the kernel's process", "its process")
            raise ModelError(death.outcome, reason, running) from None
        if not isinstance(reply, dict):
            raise ModelError(Outcome.CONTRACT, FORGED)
        if isinstance(breaches := reply.get("breaches"), list):
            self.breaches += [str(b)[:_MOST_WORDS] for b in breaches if str(b)[:_MOST_WORDS] not in self.breaches]
        if "counts" in reply:
            self.tallies = list(_tallies(reply["counts"]))
        for key in ("error", "raised"):
            if key in reply:
                raise ModelError(Outcome.ERROR, str(reply[key])[:_MOST_WORDS])
        return reply

    def build(self, recipe: Recipe, *, wide: bool) -> str:
        """Build the model in the process; return its dtype."""
        settings = {"target": recipe.target.wire(), "dtype": recipe.dtype, "train": recipe.train, "seed": recipe.seed}
        reply = self.ask({"do": "build", **settings, "wide": wide})
        if reply.get("dtype") not in TORCH_DTYPES:
            raise ModelError(Outcome.CONTRACT, FORGED)
        return str(reply["dtype"])

    def install(self, kernels: Sequence[dict[str, Any]]) -> None:
        """Install kernels in place of ATen's."""
        self.kernels = [kernel["name"] for kernel in kernels]
        reply = self.ask({"do": "install", "kernels": list(kernels)})
        self.broken, self.refused = (_words(reply.get(name)) for name in ("broken", "refused"))

    def run(self, move: int = 0) -> None:
        """Run the model from the start and set ``results`` to its tensors."""
        self.results = {}
        rows = self.ask({"do": "run", "move": move}).get("results")
        try:
            self.results = {
                str(name): Result(str(name), TORCH_DTYPES[dtype], tuple(map(int, shape)), int(nbytes))
                for name, dtype, shape, nbytes in rows  # type: ignore[union-attr]  # a forged one raises, caught below
            }
        except (TypeError, ValueError, KeyError) as error:
            raise ModelError(Outcome.CONTRACT, f"{FORGED}: {error}") from None

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield results as CPU tensors, copied before they are inspected."""
        numbers = {name: number for number, name in enumerate(self.results)}
        for chunk in self._chunks(names):
            rows = self.ask({"do": "show", "results": [numbers[name] for name in chunk]}).get("rows")
            if not isinstance(rows, list) or len(rows) != len(chunk):
                raise ModelError(Outcome.CONTRACT, FORGED)
            for name, row in zip(chunk, rows, strict=True):
                yield self._tensor(self.results[name], row)
            self.worker.release(_MAX_CHUNK_BYTES)

    def _chunks(self, names: Sequence[str]) -> Iterator[list[str]]:
        chunk: list[str] = []
        used = 0
        for name in names:
            if chunk and used + self.results[name].nbytes > _MAX_CHUNK_BYTES:
                yield chunk
                chunk, used = [], 0
            chunk.append(name)
            used += self.results[name].nbytes
        if chunk:
            yield chunk

    def _tensor(self, result: Result, row: Any) -> torch.Tensor:
        contents = self.contents(*row) if isinstance(row, list) and len(row) == 2 else None
        if contents is None or len(contents) != torch.Size(result.shape).numel() * result.dtype.itemsize:
            raise ModelError(Outcome.CONTRACT, f"{FORGED}: {result.name} is not of the size that it says")
        flat = torch.from_numpy(contents) if len(contents) else torch.empty(0, dtype=torch.uint8)
        return flat.view(result.dtype).reshape(result.shape)

    def contents(self, at: Any, nbytes: Any) -> Bytes | None:
        """Return a copy of bytes in the results' part of the arena; None if they lie outside it."""
        valid = type(at) is int and type(nbytes) is int and nbytes >= 0
        if not valid or not self.config.in_bytes <= at <= at + nbytes <= self.config.arena_bytes:
            return None
        return self.worker.bytes[at : at + nbytes].copy()

    def close(self) -> None:
        self.worker.close()


def _tallies(rows: Any) -> Iterator[Tally]:
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 5 and isinstance(row[2], int) and isinstance(row[3], dict):
            fallbacks = {str(reason)[:_MOST_WORDS]: n for reason, n in row[3].items() if isinstance(n, int)}
            yield Tally(str(row[0]), str(row[1]), row[2], fallbacks, str(row[4])[:_MOST_WORDS])


def _words(reasons: Any) -> dict[str, str]:
    return {str(k): str(v)[:_MOST_WORDS] for k, v in reasons.items()} if isinstance(reasons, dict) else {}
