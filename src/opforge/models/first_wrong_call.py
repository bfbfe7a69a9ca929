"""Find the first call of a model at which a kernel's answer is wrong.

The calls come from a run without kernels, and the judge checks each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opforge.cases.case import Expect, Phase
from opforge.cases.tensors import Bytes
from opforge.errors import CaseSyntaxError
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.compare.contract import CaseCheck
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.verdict import Verdict, VerdictKind
from opforge.models.call_recorder import RecordedCall
from opforge.models.job import ModelKernel
from opforge.models.model_process import ModelProcess, ModelProcessError
from opforge.ops import Operator, table
from opforge.sandbox.host.reply import MALFORMED_REPLY, CallsReply, MalformedReplyError
from opforge.sandbox.host.request import CallRequest, LoadRequest

_BLOB_NAME = "calls"
_CASE_ID_FORMAT = "{:016x}"


@dataclass
class WrongCallReport:
    """The check of the calls of a kernel's operators."""

    call_count: int = 0
    """Number of calls in a run of the model."""
    checked_count: int = 0
    first_wrong_call: dict[str, Any] | None = None
    """The first call with a wrong answer; None if each call by itself is within its bound."""
    largest_bound_ratio: float = 0.0
    """The largest ratio of a call's error to its bound."""

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "calls": self.call_count,
            "looked_at": self.checked_count,
            "first": self.first_wrong_call,
        }
        return row if self.first_wrong_call is not None else {**row, "largest_share_of_bound": self.largest_bound_ratio}


class WrongCallFinder:
    """Checks the calls of one kernel, which runs in its own worker."""

    def __init__(
        self, worker: KernelWorker, config: WorkerConfig, kernel: ModelKernel, forbidden: Sequence[str] = ()
    ) -> None:
        self._worker = worker
        self._config = config
        self._device = torch.device(config.device)
        self._required = kernel.ops
        self._buffer: Bytes = np.zeros(1 << 20, np.uint8)
        worker.ask(
            LoadRequest({**kernel.loading, "forbidden": list(forbidden)}),
            timeout_s=config.preparation_timeout_s,
        )

    def find_first(self, aten: ModelProcess) -> WrongCallReport:
        """Return the first call of a run at which the kernel's answer is wrong."""
        located = WrongCallReport()
        for call, blob in _recorded_calls(aten, list(self._required), located):
            facts = table().get(call.op)
            if facts is None or call.tree is None:
                continue
            located.checked_count += 1
            verdict = self._judge_call(facts, _case_of(call), blob)
            if verdict.passed or verdict.kind is VerdictKind.UNSUPPORTED:
                located.largest_bound_ratio = max(located.largest_bound_ratio, _bound_ratio(verdict))
                continue
            located.first_wrong_call = self._wrong_call_row(facts, call, verdict)
            return located
        return located

    def first_cheat(self, aten: ModelProcess, ops: Sequence[str]) -> Verdict | None:
        """Return the verdict of the first operator at which the kernel cheats, or ends its process.

        Of each operator the first call counts that the kernel does not decline.
        """
        waiting = set(ops)
        for call, blob in _recorded_calls(aten, sorted(waiting), WrongCallReport()):
            facts = table().get(call.op)
            if call.op not in waiting or facts is None or call.tree is None:
                continue
            verdict = self._judge_call(facts, _case_of(call), blob)
            if verdict.kind in (VerdictKind.CHEATED, VerdictKind.CRASHED, VerdictKind.TIMED_OUT):
                return verdict
            if verdict.kind is not VerdictKind.UNSUPPORTED:
                waiting.remove(call.op)
            if not waiting:
                break
        return None

    def _wrong_call_row(self, facts: Operator, call: RecordedCall, verdict: Verdict) -> dict[str, Any]:
        row = {"number": call.number, "op": call.op, "phase": call.phase, "case": call.text}
        return {**row, **verdict.wire(), **self._check_seeded_contents(facts, call.text, verdict)}

    def _check_seeded_contents(self, facts: Operator, text: str, verdict: Verdict) -> dict[str, Any]:
        """Report whether the kernel also fails with seeded contents; not if its process is gone."""
        if verdict.kind in (VerdictKind.CRASHED, VerdictKind.TIMED_OUT):
            return {}
        case = CaseRow(_CASE_ID_FORMAT.format(0), text, "", Expect.RETURNS, Phase.CORRECTNESS, "")
        return {"also_with_seeded_contents": not self._judge_call(facts, case, None).passed}

    def _judge_call(self, facts: Operator, case: CaseRow, blob: Bytes | None) -> Verdict:
        """Judge the kernel on one call."""
        blobs = {} if blob is None else {_BLOB_NAME: blob}
        batch = Batch(facts, self._device, self._config.input_bytes, blobs, self._buffer)
        try:
            entry = batch.add(case)
        except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
            return Verdict(VerdictKind.UNSUPPORTED, f"the case cannot be made here: {error}")
        if entry is None:
            return Verdict(VerdictKind.UNSUPPORTED, "not enough memory for the case")
        batch.copy_to(self._worker.arena_view)
        try:
            answer = self._worker.ask(CallRequest(facts.name, [entry.request()], facts.is_random))
            (reply,) = CallsReply.from_wire(answer, 1, self._config.results_region).calls
        except WorkerDiedError as death:
            return Verdict(death.kind, str(death))
        except MalformedReplyError as error:
            return Verdict(VerdictKind.CONTRACT, str(error))
        results = self._worker.copy_results([reply])
        touched = batch.changed_inputs(self._worker.arena_view)[0]
        required = bool(self._required.get(facts.name, True))
        return CaseCheck(
            facts,
            required,
            case.expect,
            entry.call,
            entry.answer,
            reply,
            results,
            self._config.input_bytes,
            touched,
        ).verdict()


def _case_of(call: RecordedCall) -> CaseRow:
    id_ = _CASE_ID_FORMAT.format(call.number)
    return CaseRow(id_, call.text, json.dumps(call.tree), Expect.RETURNS, Phase.CORRECTNESS, _BLOB_NAME)


def _recorded_calls(
    aten: ModelProcess, ops: Sequence[str], located: WrongCallReport
) -> Iterator[tuple[RecordedCall, Bytes]]:
    """Yield the calls of a run in order, with the bytes of their tensors."""
    start, has_more = 0, True
    while has_more:
        reply = aten.ask({"do": "record", "ops": list(ops), "start": start})
        seen = reply.get("seen")
        try:
            calls = [RecordedCall.from_wire(row) for row in reply["calls"]]
        except (KeyError, TypeError, ValueError):
            raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY) from None
        if not isinstance(seen, int):
            raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY)
        located.call_count = seen
        blob = aten.copy_bytes(aten.config.input_bytes, reply.get("used"))
        if blob is None:
            raise ModelProcessError(VerdictKind.CONTRACT, MALFORMED_REPLY)
        for call in calls:
            yield call, blob
        aten.worker.release_arena(len(blob))
        start += len(calls)
        has_more = bool(calls) and start < seen


def _bound_ratio(verdict: Verdict) -> float:
    bound = verdict.figures.get("bound") or 0.0
    return float(verdict.figures.get("kernel_error", 0.0)) / bound if bound else 0.0
