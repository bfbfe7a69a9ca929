"""Draw repeatedly from a random operator's kernel and from ATen, and test the draws.

Each case is drawn in groups: a seed, a second call under it, the next seed, a second call under
that. A kernel whose draws equal ATen's bit for bit passes after one group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from opforge.cases.encoding import TORCH_DTYPES
from opforge.cases.materialise import flat_bytes
from opforge.judge import support
from opforge.judge.batch import Placed
from opforge.judge.battery import Battery
from opforge.judge.contract import Hearing, tensor_names
from opforge.judge.distribution import GROUP, PILOTS, Sample, Weighed, draws_wanted, identical, positions, weigh
from opforge.judge.reference import Answer, plain, tensors_of
from opforge.judge.replies import FORGED, replies_of, results_end, without_places
from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.judge.workers import KernelWorker, WorkerConfig
from opforge.ops import Operator

_MAX_MESSAGE_CASES = 500
_MAX_MESSAGE_BYTES = 64 << 20
_LOOKED_AT = 1_000_000
"""Elements of whole draws that are checked by the operator's own rules."""

Request = dict[str, Any]


def judge_draws(
    worker: KernelWorker,
    op: Operator,
    placed: Placed,
    hearing: Hearing,
    reply: dict[str, Any],
    config: WorkerConfig,
    finding: Finding,
) -> Finding:
    """Return the verdict on a random operator's case whose first draw keeps the contract."""
    try:
        figures = _DrawJudge(worker, op, placed, hearing, reply, config).figures()
    except NotRightError as error:
        return error.finding
    return replace(finding, figures={**finding.figures, **figures})


@dataclass
class _SideDraws:
    """Draws of one result by the kernel or by ATen, at the sampled positions."""

    rows: list[torch.Tensor] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)
    nan: bool = False

    def keep(self, value: torch.Tensor, at: torch.Tensor) -> None:
        flat = _flat(value)
        total = flat.mean(dtype=torch.float64)
        self.rows.append(flat[at])
        self.totals.append(total)
        self.nan = self.nan or (bool(total.isnan()) and bool(flat.isnan().any()))


@dataclass
class _ResultDraws:
    """Draws of one result by both sides."""

    kernel: _SideDraws = field(default_factory=_SideDraws)
    aten: _SideDraws = field(default_factory=_SideDraws)
    whole: list[torch.Tensor] = field(default_factory=list)
    """Some draws of the kernel with all their elements."""

    def sample(self, pilot: torch.Tensor, at: torch.Tensor, row: int) -> Sample:
        kernel, aten = torch.stack(self.kernel.rows), torch.stack(self.aten.rows)
        return Sample(kernel, aten, pilot, at, row, torch.stack(self.kernel.totals), torch.stack(self.aten.totals))


@dataclass
class _DrawJudge:
    worker: KernelWorker
    op: Operator
    placed: Placed
    hearing: Hearing
    reply: dict[str, Any]
    config: WorkerConfig

    def figures(self) -> dict[str, Any]:
        """Return the figures of the draws; raise NotRightError when they are wrong."""
        if not self._elements:
            return {}
        if self._first_draws_equal_aten():
            return {"identical_draws": 1 + GROUP}
        kept = [_ResultDraws() for _ in self._first]
        for start, count in self._messages():
            self._keep(kept, start, count)
        self._check_rules(kept)
        weighed, figures = self._run_battery(kept)
        if weighed.reason is not None:
            raise NotRightError(Outcome.WRONG, weighed.reason, **figures)
        return figures

    def _first_draws_equal_aten(self) -> bool:
        """Draw one group, and the first seed once more; return whether all draws equal ATen's."""
        requests = [*self._requests("opening", 0, GROUP), self._requests("opening", 0, 1)[0]]
        self.worker.begin({"do": "call", "op": self.op.name, "random": True, "cases": requests})
        aten = [self._values(answer) for answer in self._answers("opening", 0, GROUP)]
        again = self._values(next(self._answers("opening", 0, 1)))
        kernel = list(self._read(requests))
        if _same(again, aten[0]) and not _same(kernel[-1], kernel[0]):
            raise NotRightError(
                Outcome.CONTRACT, "the seed does not fix the draw: two calls after one and the same seed differ"
            )
        first = self._values(self.hearing.aten)
        return _same(self._first, first) and all(_same(k, a) for k, a in zip(kernel, aten, strict=False))

    def _messages(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the number of draws of each message."""
        size = max(1, sum(t.numel() * t.element_size() + 64 for t in self._first) * (2 if self.placed.call.own else 1))
        max_draws = max(GROUP, min(_MAX_MESSAGE_CASES, _MAX_MESSAGE_BYTES // size) // GROUP * GROUP)
        for start in range(0, self._draws, max_draws):
            yield start, min(max_draws, self._draws - start)

    def _keep(self, kept: list[_ResultDraws], start: int, count: int) -> None:
        """Draw ``count`` times from both and keep samples; ATen draws while the worker does."""
        requests = self._requests("kernel", start, count)
        self.worker.begin({"do": "call", "op": self.op.name, "random": True, "cases": requests})
        for answer in self._answers("aten", start, count):
            for draws, value, at in zip(kept, self._values(answer), self._at, strict=True):
                draws.aten.keep(value, at)
        for values in self._read(requests):
            for draws, value, at in zip(kept, values, self._at, strict=True):
                draws.kernel.keep(value, at)
                if len(draws.whole) * value.numel() < _LOOKED_AT:
                    draws.whole.append(value)

    def _read(self, requests: list[Request]) -> Iterator[list[torch.Tensor]]:
        """Yield the result tensors of each requested draw."""
        replies = replies_of(self.worker.answer(cases=len(requests)), len(requests))
        if replies is None:
            raise NotRightError(Outcome.CONTRACT, FORGED)
        results = bytearray(self.worker.bytes[self.config.in_bytes : results_end(replies, self.config)])
        self._check_inputs_unchanged()
        expected = without_places(self.reply)
        for reply in replies:
            if without_places(reply) != expected:
                self._hear(reply, results)
            self._unwritten(reply, results)
            yield [self._tensor(row, results) for row in self._rows(reply)]

    def _hear(self, reply: dict[str, Any], results: bytearray) -> None:
        """Judge a draw that is described differently from the first: it may break the contract."""
        fresh = replace(self.hearing, aten=self.placed.call.run(), reply=reply, results=results, notes=[], values=[])
        finding = fresh.finding()
        if not finding.passed:
            raise NotRightError(finding.outcome, finding.reason, **finding.figures)

    def _check_inputs_unchanged(self) -> None:
        buffer = self.placed.call.buffer
        for index, (start, nbytes, *_) in enumerate(self.placed.inputs):
            if not np.array_equal(self.worker.bytes[start : start + nbytes], buffer[start : start + nbytes]):
                name = list(tensor_names(self.op, self.placed.call))[index]
                raise NotRightError(Outcome.CONTRACT, f"wrote to `{name}`, which {self.op.name} must not change")

    def _unwritten(self, reply: dict[str, Any], results: bytearray) -> None:
        """Check returned inputs that the operator must not write to."""
        for index, before in self._read_only_contents.items():
            after = self._tensor(reply["inputs"][index], results)
            if not torch.equal(flat_bytes(after), before):
                name = list(tensor_names(self.op, self.placed.call))[index]
                raise NotRightError(Outcome.CONTRACT, f"wrote to `{name}`, which {self.op.authority} left alone")

    def _tensor(self, row: list[Any], results: bytearray) -> torch.Tensor:
        start, nbytes, dtype, shape = row[0] - self.config.in_bytes, row[1], TORCH_DTYPES[row[2]], row[3]
        if not (isinstance(start, int) and 0 <= start <= start + nbytes <= len(results)):
            raise NotRightError(Outcome.CONTRACT, FORGED)
        count = nbytes // dtype.itemsize
        flat = (
            torch.frombuffer(results, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        )
        return flat.reshape(shape)

    def _check_rules(self, kept: list[_ResultDraws]) -> None:
        for name, draws in zip(self._names, kept, strict=True):
            if draws.kernel.nan and not draws.aten.nan:
                raise NotRightError(Outcome.WRONG, f"{name}: NaN among the draws, where {self.op.authority} has none")
        args, kwargs, _inputs = self.placed.call.build()
        look = support.Look(self.op.bind(args, kwargs), [torch.stack(k.whole) for k in kept])
        if reason := support.broken(self.op, look):
            raise NotRightError(Outcome.WRONG, reason)

    def _run_battery(self, kept: list[_ResultDraws]) -> tuple[Weighed, dict[str, Any]]:
        """Judge the draws of all results by one battery."""
        pilots = [self._values(answer) for answer in self._answers("pilot", 0, PILOTS)]
        batteries = []
        for index, (draws, at) in enumerate(zip(kept, self._at, strict=True)):
            pilot = torch.stack([_flat(values[index])[at] for values in pilots])
            first = self._first[index]
            row = (first.shape[-1] if first.dim() else 1) * (2 if first.is_complex() else 1)
            batteries.append(Battery(draws.sample(pilot, at, row), self._names[index]))
        weighed = weigh(test for battery in batteries for test in battery.tests())
        return weighed, {**batteries[0].figures(weighed), **weighed.figures}

    def _requests(self, side: str, start: int, count: int) -> list[Request]:
        wire = {"args": self.placed.call.args, "kwargs": self.placed.call.kwargs, "own": self.placed.call.own}
        seeds = (self._seed(side, number) for number in range(start, start + count))
        return [wire if seed is None else {**wire, "seed": seed} for seed in seeds]

    def _answers(self, side: str, start: int, count: int) -> Iterator[Answer]:
        for number in range(start, start + count):
            yield replace(self.placed.call, seed=self._seed(side, number)).run()

    def _seed(self, side: str, number: int) -> int | None:
        """Return the seed of a draw, or None for a second call under the seed before it."""
        group, place = divmod(number, GROUP)
        if place % 2:
            return None
        digest = hashlib.blake2b(f"{self.placed.case.id}:{side}:{group}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") + place // 2

    def _values(self, answer: Answer) -> list[torch.Tensor]:
        """Return ATen's draws: its results, and inputs that it writes but does not return."""
        if answer.raised is not None:
            raise NotRightError(Outcome.ERROR, f"{self.op.authority} itself raises on a second draw: {answer.raised}")
        tensors = [*tensors_of(answer.result), *(answer.inputs[i] for i in self._written_unreturned)]
        return [plain(t).cpu() for t in tensors]

    def _rows(self, reply: dict[str, Any]) -> list[list[Any]]:
        """Return the wire rows of the kernel's draws, in the order of ``_values``."""
        return [*_returned(reply["returned"]), *(reply["inputs"][i] for i in self._written_unreturned)]

    @cached_property
    def _written(self) -> list[int]:
        writes = {a.name for a in self.op.arguments if a.writes}
        return [i for i, n in enumerate(tensor_names(self.op, self.placed.call)) if n.partition("[")[0] in writes]

    @cached_property
    def _written_unreturned(self) -> list[int]:
        """Inputs that the operator writes and does not return, such as the noise of rrelu."""
        answer = self.hearing.aten
        return [i for i in self._written if not any(t is answer.inputs[i] for t in tensors_of(answer.result))]

    @cached_property
    def _read_only_contents(self) -> dict[int, torch.Tensor]:
        if "inputs" not in self.reply:
            return {}
        inputs = self.placed.call.build()[2]
        return {i: flat_bytes(t.cpu()) for i, t in enumerate(inputs) if i not in self._written}

    @cached_property
    def _first(self) -> list[torch.Tensor]:
        """The kernel's first draw, which was already judged."""
        results = self.hearing.results
        return [self._tensor(row, results) for row in self._rows(self.reply)]

    @cached_property
    def _names(self) -> list[str]:
        names = list(tensor_names(self.op, self.placed.call))
        count = len(self._first) - len(self._written_unreturned)
        results = ["result"] if count == 1 else [f"result[{i}]" for i in range(count)]
        return [*results, *(f"`{names[i]}`" for i in self._written_unreturned)]

    @cached_property
    def _elements(self) -> int:
        return max((t.numel() for t in self._first), default=0)

    @cached_property
    def _draws(self) -> int:
        return draws_wanted(self._elements)

    @cached_property
    def _at(self) -> list[torch.Tensor]:
        return [positions(_flat(t).numel(), self._draws) for t in self._first]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(identical(a, b) for a, b in zip(left, right, strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in one dimension; a complex number becomes two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor)
    return tensor.reshape(-1)


def _returned(tree: Any) -> Iterator[list[Any]]:
    if isinstance(tree, dict) and "T" in tree:
        yield tree["T"]
    elif isinstance(tree, list):
        for value in tree:
            yield from _returned(value)
