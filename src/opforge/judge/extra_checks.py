"""Checks of a kernel that need more than the calls of its cases.

Gradients; a wrong answer again, alone and after a wait; contents of a timed call in a new process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opforge.cases.tensors import Bytes
from opforge.judge.batch import BatchEntry
from opforge.judge.compare.contract import CaseCheck
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.reference.aten import CallOutcome, ReferenceCall
from opforge.judge.verdict import Verdict, VerdictKind
from opforge.judge.wire_arguments import storage_bytes
from opforge.ops import Operator
from opforge.sandbox.host.reply import CallReply, CallsReply, LoadReply, MalformedReplyError
from opforge.sandbox.host.request import CallRequest, GradientRequest, LoadRequest

_LATE_RESULT_WAIT_S = 0.1


def check_gradients(
    worker: KernelWorker, config: WorkerConfig, op: Operator, entry: BatchEntry, call: ReferenceCall, aten: CallOutcome
) -> Verdict | None:
    """Judge the gradients through an operator with the kernel installed; None if they are right."""
    try:
        (reply,), results = _replies(worker, GradientRequest(op.name, entry.request()), 1)
    except MalformedReplyError as error:
        return Verdict(VerdictKind.CONTRACT, str(error))
    gradient_call = replace(call, owns_storage=False)
    verdict = CaseCheck(
        op, True, entry.case.expect, gradient_call, aten, reply, results, config.input_bytes, measure_errors=False
    ).verdict()  # fmt: skip
    return None if verdict.passed else replace(verdict, reason=f"gradients through the kernel: {verdict.reason}")


def check_late_result(worker: KernelWorker, entry: BatchEntry, case_check: CaseCheck) -> Verdict | None:
    """Repeat a call with a wrong answer by itself, and wait before reading the result.

    This shows results that are written late, or depend on other calls.
    """
    request = entry.request()
    cases = [request, request, replace(request, wait_s=_LATE_RESULT_WAIT_S)]
    op = case_check.op
    try:
        replies, results = _replies(worker, CallRequest(op.name, cases, op.is_random), len(cases))
    except MalformedReplyError as error:
        return Verdict(VerdictKind.CONTRACT, str(error))
    passed = [
        replace(case_check, reply=r, results=results, notes=[], result_pairs=[]).verdict().passed for r in replies
    ]
    if passed == [False, False, True]:
        late = f"wrong immediately, three times, and right when read {_LATE_RESULT_WAIT_S:g} s later"
        return Verdict(VerdictKind.CHEATED, f"{late}: the result is written after the call returned")
    if all(passed):
        alone = "wrong after other calls, and right three times when called by itself"
        return Verdict(VerdictKind.CONTRACT, f"{alone}: the result depends on earlier calls")
    return None


def recheck_in_new_process(
    worker: KernelWorker,
    config: WorkerConfig,
    kernel: dict[str, Any],
    op: Operator,
    entry: BatchEntry,
    contents_seed: int,
    *,
    required: bool,
) -> Verdict | None:
    """Judge a kernel's answer to a case with renewed contents in a new worker, and close it.

    Return None where there is no answer to judge.
    """
    call = replace(entry.call, contents_seed=contents_seed)
    try:
        loaded = worker.ask(LoadRequest(kernel), timeout_s=config.preparation_timeout_s)
        if LoadReply.from_wire(loaded).is_refused:
            return None
        inputs = replace(call, device=torch.device("cpu"), owns_storage=True).build_arguments()[2]
        for (start, *_), contents in zip(entry.input_rows, map(storage_bytes, inputs), strict=True):
            worker.arena_view[start : start + len(contents)] = contents
        (reply,), results = _replies(worker, CallRequest(op.name, [entry.request()], op.is_random), 1)
    except (WorkerDiedError, MalformedReplyError):
        return None
    finally:
        worker.close()
    verdict = CaseCheck(
        op, required, entry.case.expect, call, call.run(), reply, results, config.input_bytes, measure_errors=False
    ).verdict()
    return replace(verdict, reason=f"with other contents, as in timed calls: {verdict.reason}")


def _replies(worker: KernelWorker, request: CallRequest | GradientRequest, count: int) -> tuple[list[CallReply], Bytes]:
    """Return the replies to a request and a private copy of the results."""
    reply = CallsReply.from_wire(worker.ask(request, cases=count), count, worker.config.results_region)
    return reply.calls, worker.copy_results(reply.calls)
