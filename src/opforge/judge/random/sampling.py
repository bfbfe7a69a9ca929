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

from opforge.cases.tensors import Bytes, flat_bytes, tensor_from_row
from opforge.judge.batch import BatchEntry
from opforge.judge.compare.contract import CaseCheck, tensor_names
from opforge.judge.facts import facts_of
from opforge.judge.kernel_worker import KernelWorker
from opforge.judge.random import rules
from opforge.judge.random.distribution import (
    DRAWS_PER_GROUP,
    PILOT_DRAWS,
    JointTestResult,
    Sample,
    draw_count,
    identical,
    judge_jointly,
    sampled_positions,
)
from opforge.judge.random.tests import DrawTests
from opforge.judge.reference.aten import CallOutcome, resolved
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.ops import Operator
from opforge.runtime.trees import instances
from opforge.sandbox.host.reply import CallReply, CallsReply, MalformedReplyError, ReportedTensor
from opforge.sandbox.host.request import CallRequest, CaseRequest

_MAX_MESSAGE_CASES = 500
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_RULE_ELEMENTS = 1_000_000
"""Elements of whole draws that are checked by the operator's own rules."""


def judge_draws(
    worker: KernelWorker,
    op: Operator,
    entry: BatchEntry,
    case_check: CaseCheck,
    verdict: Verdict,
) -> Verdict:
    """Return the verdict on a random operator's case whose first draw keeps the contract."""
    try:
        figures = _DrawJudge(worker, op, entry, case_check).figures()
    except RejectedError as error:
        return error.verdict
    except MalformedReplyError as error:
        return Verdict(VerdictKind.CONTRACT, str(error))
    return replace(verdict, figures={**verdict.figures, **figures})


@dataclass
class _SideDraws:
    """Draws of one result by the kernel or by ATen, at the sampled positions."""

    samples: list[torch.Tensor] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    has_nan: bool = False

    def add(self, value: torch.Tensor, positions: torch.Tensor) -> None:
        flat = _flat(value)
        total = flat.mean(dtype=torch.float64)
        self.samples.append(flat[positions])
        self.means.append(total)
        self.has_nan = self.has_nan or (bool(total.isnan()) and bool(flat.isnan().any()))


@dataclass
class _ResultDraws:
    """Draws of one result by both sides."""

    kernel: _SideDraws = field(default_factory=_SideDraws)
    aten: _SideDraws = field(default_factory=_SideDraws)
    whole_draws: list[torch.Tensor] = field(default_factory=list)
    """Some draws of the kernel with all their elements."""

    def sample(self, pilot: torch.Tensor, positions: torch.Tensor, row_length: int) -> Sample:
        kernel, aten = torch.stack(self.kernel.samples), torch.stack(self.aten.samples)
        return Sample(
            kernel, aten, pilot, positions, row_length, torch.stack(self.kernel.means), torch.stack(self.aten.means)
        )


@dataclass
class _DrawJudge:
    worker: KernelWorker
    op: Operator
    entry: BatchEntry
    case_check: CaseCheck

    def figures(self) -> dict[str, Any]:
        """Return the figures of the draws; raise RejectedError when they are wrong."""
        if not self._max_elements:
            return {}
        if self._first_draws_equal_aten():
            return {"identical_draws": 1 + DRAWS_PER_GROUP}
        kept = [_ResultDraws() for _ in self._first_draw]
        for start, count in self._messages():
            self._collect(kept, start, count)
        self._check_rules(kept)
        result, figures = self._run_tests(kept)
        if result.reason is not None:
            raise RejectedError(VerdictKind.WRONG, result.reason, **figures)
        return figures

    def _first_draws_equal_aten(self) -> bool:
        """Draw one group, and the first seed once more; return whether all draws equal ATen's."""
        requests = [*self._requests("opening", 0, DRAWS_PER_GROUP), self._requests("opening", 0, 1)[0]]
        self.worker.begin(CallRequest(self.op.name, requests, random=True))
        aten = [self._aten_draw(answer) for answer in self._answers("opening", 0, DRAWS_PER_GROUP)]
        again = self._aten_draw(next(self._answers("opening", 0, 1)))
        kernel = list(self._kernel_draws(len(requests)))
        if _all_identical(again, aten[0]) and not _all_identical(kernel[-1], kernel[0]):
            raise RejectedError(
                VerdictKind.CONTRACT, "the seed does not determine the sample: two calls after the same seed differ"
            )
        first = self._aten_draw(self.case_check.aten)
        return _all_identical(self._first_draw, first) and all(
            _all_identical(k, a) for k, a in zip(kernel, aten, strict=False)
        )

    def _messages(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the number of draws of each message."""
        size = max(
            1,
            sum(t.numel() * t.element_size() + 64 for t in self._first_draw)
            * (2 if self.entry.call.owns_storage else 1),
        )
        max_draws = max(
            DRAWS_PER_GROUP, min(_MAX_MESSAGE_CASES, _MAX_MESSAGE_BYTES // size) // DRAWS_PER_GROUP * DRAWS_PER_GROUP
        )
        for start in range(0, self._draw_count, max_draws):
            yield start, min(max_draws, self._draw_count - start)

    def _collect(self, kept: list[_ResultDraws], start: int, count: int) -> None:
        """Draw ``count`` times from both and keep samples; ATen draws while the worker does."""
        requests = self._requests("kernel", start, count)
        self.worker.begin(CallRequest(self.op.name, requests, random=True))
        for answer in self._answers("aten", start, count):
            for draws, value, positions in zip(kept, self._aten_draw(answer), self._positions, strict=True):
                draws.aten.add(value, positions)
        for values in self._kernel_draws(len(requests)):
            for draws, value, positions in zip(kept, values, self._positions, strict=True):
                draws.kernel.add(value, positions)
                if len(draws.whole_draws) * value.numel() < _MAX_RULE_ELEMENTS:
                    draws.whole_draws.append(value)

    def _kernel_draws(self, count: int) -> Iterator[list[torch.Tensor]]:
        """Yield the result tensors of each requested draw."""
        replies = CallsReply.from_wire(self.worker.answer(cases=count), count, self.worker.config.results_region).calls
        results = self.worker.copy_results(replies)
        self._check_inputs_unchanged()
        expected = self._first_reply.without_locations()
        for reply in replies:
            if reply.without_locations() != expected:
                self._check_reply(reply, results)
            self._check_read_only_inputs(reply, results)
            yield [self._tensor(draw, results) for draw in self._reported_draws(reply)]

    def _check_reply(self, reply: CallReply, results: Bytes) -> None:
        """Judge a draw that is described differently from the first: it may break the contract."""
        fresh = replace(
            self.case_check, aten=self.entry.call.run(), reply=reply, results=results, notes=[], result_pairs=[]
        )
        verdict = fresh.verdict()
        if not verdict.passed:
            raise RejectedError(verdict.kind, verdict.reason, **verdict.figures)

    def _check_inputs_unchanged(self) -> None:
        buffer = self.entry.call.buffer
        for index, (start, nbytes, *_) in enumerate(self.entry.input_rows):
            if not np.array_equal(self.worker.arena_view[start : start + nbytes], buffer[start : start + nbytes]):
                name = list(tensor_names(self.op, self.entry.call))[index]
                raise RejectedError(VerdictKind.CONTRACT, f"wrote to `{name}`, which {self.op.name} must not change")

    def _check_read_only_inputs(self, reply: CallReply, results: Bytes) -> None:
        """Check returned inputs that the operator must not write to."""
        for index, before in self._read_only_contents.items():
            after = self._tensor(_reported_input(reply, index), results)
            if not torch.equal(flat_bytes(after), before):
                name = list(tensor_names(self.op, self.entry.call))[index]
                raise RejectedError(
                    VerdictKind.CONTRACT, f"wrote to `{name}`, which {self.op.reference_name} left alone"
                )

    def _tensor(self, reported: ReportedTensor, results: Bytes) -> torch.Tensor:
        return tensor_from_row(results, reported.row(self.case_check.results_offset))

    def _check_rules(self, kept: list[_ResultDraws]) -> None:
        for name, draws in zip(self._names, kept, strict=True):
            if draws.kernel.has_nan and not draws.aten.has_nan:
                raise RejectedError(
                    VerdictKind.WRONG, f"{name}: NaN among the samples, where {self.op.reference_name} has none"
                )
        args, kwargs, _inputs = self.entry.call.build_arguments()
        look = rules.Draws(self.op.bind(args, kwargs), [torch.stack(k.whole_draws) for k in kept])
        if reason := rules.broken_rule(facts_of(self.op).random_rule, look):
            raise RejectedError(VerdictKind.WRONG, reason)

    def _run_tests(self, kept: list[_ResultDraws]) -> tuple[JointTestResult, dict[str, Any]]:
        """Test the draws of all results together."""
        pilots = [self._aten_draw(answer) for answer in self._answers("pilot", 0, PILOT_DRAWS)]
        draw_tests = []
        for index, (draws, positions) in enumerate(zip(kept, self._positions, strict=True)):
            pilot = torch.stack([_flat(values[index])[positions] for values in pilots])
            first = self._first_draw[index]
            row = (first.shape[-1] if first.dim() else 1) * (2 if first.is_complex() else 1)
            draw_tests.append(DrawTests(draws.sample(pilot, positions, row), self._names[index]))
        result = judge_jointly(test for tests in draw_tests for test in tests.tests())
        return result, {**draw_tests[0].figures(result), **result.figures}

    def _requests(self, side: str, start: int, count: int) -> list[CaseRequest]:
        call = self.entry.call
        seeds = (self._seed(side, number) for number in range(start, start + count))
        return [CaseRequest(call.args, call.kwargs, call.owns_storage, seed=seed) for seed in seeds]

    def _answers(self, side: str, start: int, count: int) -> Iterator[CallOutcome]:
        for number in range(start, start + count):
            yield replace(self.entry.call, rng_seed=self._seed(side, number)).run()

    def _seed(self, side: str, number: int) -> int | None:
        """Return the seed of a draw, or None for a second call under the seed before it."""
        group, place = divmod(number, DRAWS_PER_GROUP)
        if place % 2:
            return None
        digest = hashlib.blake2b(f"{self.entry.case.id}:{side}:{group}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") + place // 2

    def _aten_draw(self, answer: CallOutcome) -> list[torch.Tensor]:
        """Return ATen's draws: its results, and inputs that it writes but does not return."""
        if answer.raised is not None:
            raise RejectedError(
                VerdictKind.ERROR, f"{self.op.reference_name} itself raises on a second call: {answer.raised}"
            )
        tensors = [*instances(answer.result, torch.Tensor), *(answer.inputs[i] for i in self._written_unreturned)]
        return [resolved(t).cpu() for t in tensors]

    @property
    def _first_reply(self) -> CallReply:
        return self.case_check.reply

    def _reported_draws(self, reply: CallReply) -> list[ReportedTensor]:
        """Return the kernel's draws, in the order of ``_aten_draw``."""
        inputs = (_reported_input(reply, i) for i in self._written_unreturned)
        return [*instances(reply.returned, ReportedTensor), *inputs]

    @cached_property
    def _written(self) -> list[int]:
        writes = {a.name for a in self.op.arguments if a.writes}
        return [i for i, n in enumerate(tensor_names(self.op, self.entry.call)) if n.partition("[")[0] in writes]

    @cached_property
    def _written_unreturned(self) -> list[int]:
        """Inputs that the operator writes and does not return, such as the noise of rrelu."""
        answer = self.case_check.aten
        return [
            i for i in self._written if not any(t is answer.inputs[i] for t in instances(answer.result, torch.Tensor))
        ]

    @cached_property
    def _read_only_contents(self) -> dict[int, torch.Tensor]:
        if self._first_reply.inputs is None:
            return {}
        inputs = self.entry.call.build_arguments()[2]
        return {i: flat_bytes(t.cpu()) for i, t in enumerate(inputs) if i not in self._written}

    @cached_property
    def _first_draw(self) -> list[torch.Tensor]:
        """The kernel's first draw, which was already judged."""
        results = self.case_check.results
        return [self._tensor(draw, results) for draw in self._reported_draws(self._first_reply)]

    @cached_property
    def _names(self) -> list[str]:
        names = list(tensor_names(self.op, self.entry.call))
        count = len(self._first_draw) - len(self._written_unreturned)
        results = ["result"] if count == 1 else [f"result[{i}]" for i in range(count)]
        return [*results, *(f"`{names[i]}`" for i in self._written_unreturned)]

    @cached_property
    def _max_elements(self) -> int:
        return max((t.numel() for t in self._first_draw), default=0)

    @cached_property
    def _draw_count(self) -> int:
        return draw_count(self._max_elements)

    @cached_property
    def _positions(self) -> list[torch.Tensor]:
        return [sampled_positions(_flat(t).numel(), self._draw_count) for t in self._first_draw]


def _all_identical(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(identical(a, b) for a, b in zip(left, right, strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in one dimension; a complex number becomes two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor)
    return tensor.reshape(-1)


def _reported_input(reply: CallReply, index: int) -> ReportedTensor:
    tensor = reply.inputs[index] if reply.inputs is not None and index < len(reply.inputs) else None
    if tensor is None:
        raise MalformedReplyError
    return tensor
