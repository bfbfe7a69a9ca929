"""The judge's handle on a process that runs a model. Its replies are validated before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.cases.tensors import Bytes
from opforge.cases.wire import TORCH_DTYPES
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.verdict import VerdictKind
from opforge.models.job import ModelKernel, ModelSpec
from opforge.sandbox.guard.confinement import Confinement
from opforge.sandbox.host.client import Spawner
from opforge.sandbox.host.reply import MALFORMED_REPLY

_MAX_CHUNK_BYTES = 256 << 20
_MAX_TEXT_CHARS = 1000


class ModelProcessError(Exception):
    """A model's process failed to do a request.

    Carries the verdict, and the running kernel if the process died.
    """

    def __init__(self, kind: VerdictKind, reason: str, kernel: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.running_kernel = kernel


@dataclass(frozen=True, slots=True)
class ReportedCalls:
    """The calls of a kernel for one operator in a run."""

    kernel: str
    op: str
    answered: int
    fallbacks: Mapping[str, int]
    raised: str


@dataclass(frozen=True, slots=True)
class ResultInfo:
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
    results: dict[str, ResultInfo] = field(default_factory=dict)
    call_counts: list[ReportedCalls] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, spawner: Spawner, config: WorkerConfig, confinement: Confinement | None) -> ModelProcess:
        return cls(KernelWorker(spawner, config, confinement, role="model"), config)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a reply; raises ModelError if the process died, raised, or sent a forged reply."""
        try:
            reply = self.worker.ask(request)
        except WorkerDiedError as death:
            running = self.kernels[death.case_index - 1] if 0 < death.case_index <= len(self.kernels) else ""
            reason = str(death).replace("the kernel's process", "its process")
            raise ModelProcessError(death.kind, reason, running) from None
        if not isinstance(reply, dict):
            raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY)
        if isinstance(breaches := reply.get("breaches"), list):
            self.breaches += [
                str(b)[:_MAX_TEXT_CHARS] for b in breaches if str(b)[:_MAX_TEXT_CHARS] not in self.breaches
            ]
        if "counts" in reply:
            self.call_counts = list(_parse_call_counts(reply["counts"]))
        for key in ("error", "raised"):
            if key in reply:
                raise ModelProcessError(VerdictKind.ERROR, str(reply[key])[:_MAX_TEXT_CHARS])
        return reply

    def build(self, spec: ModelSpec, *, wide: bool) -> str:
        """Build the model in the process; return its dtype."""
        reply = self.ask({"do": "build", "spec": spec.wire(), "wide": wide})
        if reply.get("dtype") not in TORCH_DTYPES:
            raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY)
        return str(reply["dtype"])

    def install(self, kernels: Sequence[ModelKernel]) -> None:
        """Install kernels in place of ATen's."""
        self.kernels = [kernel.name for kernel in kernels]
        reply = self.ask({"do": "install", "kernels": [kernel.wire() for kernel in kernels]})
        self.broken, self.refused = (_parse_reasons(reply.get(name)) for name in ("broken", "refused"))

    def run(self, perturbation_seed: int = 0) -> None:
        """Run the model from the start and set ``results`` to its tensors."""
        self.results = {}
        rows = self.ask({"do": "run", "move": perturbation_seed}).get("results")
        try:
            self.results = {
                str(name): ResultInfo(str(name), TORCH_DTYPES[dtype], tuple(map(int, shape)), int(nbytes))
                for name, dtype, shape, nbytes in rows  # type: ignore[union-attr]  # a forged one raises, caught below
            }
        except (TypeError, ValueError, KeyError) as error:
            raise ModelProcessError(VerdictKind.CONTRACT, f"{MALFORMED_REPLY}: {error}") from None

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield results as CPU tensors, copied before they are inspected."""
        numbers = {name: number for number, name in enumerate(self.results)}
        for chunk in self._chunks(names):
            rows = self.ask({"do": "show", "results": [numbers[name] for name in chunk]}).get("rows")
            if not isinstance(rows, list) or len(rows) != len(chunk):
                raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY)
            for name, row in zip(chunk, rows, strict=True):
                yield self._tensor(self.results[name], row)
            self.worker.release_arena(_MAX_CHUNK_BYTES)

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

    def _tensor(self, result: ResultInfo, row: Any) -> torch.Tensor:
        contents = self.copy_bytes(*row) if isinstance(row, list) and len(row) == 2 else None
        if contents is None or len(contents) != torch.Size(result.shape).numel() * result.dtype.itemsize:
            raise ModelProcessError(
                VerdictKind.CONTRACT, f"{MALFORMED_REPLY}: {result.name} does not have the size that it reports"
            )
        flat = torch.from_numpy(contents) if len(contents) else torch.empty(0, dtype=torch.uint8)
        return flat.view(result.dtype).reshape(result.shape)

    def copy_bytes(self, offset: Any, nbytes: Any) -> Bytes | None:
        """Return a copy of bytes in the results' part of the arena; None if they lie outside it."""
        valid = type(offset) is int and type(nbytes) is int and nbytes >= 0
        if not valid or not self.config.input_bytes <= offset <= offset + nbytes <= self.config.arena_bytes:
            return None
        return self.worker.arena_view[offset : offset + nbytes].copy()

    def close(self) -> None:
        self.worker.close()


def _parse_call_counts(rows: Any) -> Iterator[ReportedCalls]:
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 5 and isinstance(row[2], int) and isinstance(row[3], dict):
            fallbacks = {str(reason)[:_MAX_TEXT_CHARS]: n for reason, n in row[3].items() if isinstance(n, int)}
            yield ReportedCalls(str(row[0]), str(row[1]), row[2], fallbacks, str(row[4])[:_MAX_TEXT_CHARS])


def _parse_reasons(reasons: Any) -> dict[str, str]:
    return {str(k): str(v)[:_MAX_TEXT_CHARS] for k, v in reasons.items()} if isinstance(reasons, dict) else {}
