"""Further checks of a kernel, beside its cases.

Gradients; a wrong answer again, alone and after a wait; contents of a timed call in a new process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opforge.judge.batch import BatchEntry
from opforge.judge.compare.contract import CaseCheck
from opforge.judge.kernel_worker import KernelWorker, WorkerConfig, WorkerDiedError
from opforge.judge.reference.aten import CallOutcome, ReferenceCall
from opforge.judge.reference.user import LOAD_TIMEOUT_S
from opforge.judge.replies import MALFORMED_REPLY, parse_replies, results_end
from opforge.judge.verdict import RejectedError, Verdict, VerdictKind
from opforge.judge.wire_arguments import storage_bytes
from opforge.ops import Operator

_LATE_RESULT_WAIT_S = 0.1
_REFUSAL_KEYS = ("tried", "error", "tampered", "state")


def check_gradients(
    worker: KernelWorker, config: WorkerConfig, op: Operator, entry: BatchEntry, call: ReferenceCall, aten: CallOutcome
) -> Verdict | None:
    """Judge the gradients through an operator with the kernel installed; None if they are right."""
    request = {"do": "gradient", "op": op.name, "case": entry.request()}
    try:
        (reply,), results = _checked_replies(worker, config, request, 1)
    except RejectedError as error:
        return error.verdict
    gradient_call = replace(call, owns_storage=False)
    finding = CaseCheck(
        op, True, entry.case.expect, gradient_call, aten, reply, results, config.input_bytes, measure_errors=False
    ).verdict()  # fmt: skip
    return None if finding.passed else replace(finding, reason=f"gradients through the kernel: {finding.reason}")


def check_late_result(
    worker: KernelWorker, config: WorkerConfig, entry: BatchEntry, case_check: CaseCheck
) -> Verdict | None:
    """Repeat a call with a wrong answer by itself, and wait before reading the result.

    This shows results that are written late, or depend on other calls.
    """
    request = entry.request()
    cases = [request, request, {**request, "linger_s": _LATE_RESULT_WAIT_S}]
    try:
        replies, results = _checked_replies(worker, config, _call_request(case_check.op, cases), len(cases))
    except RejectedError as error:
        return error.verdict
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
        loaded = worker.ask({"do": "load", "kernel": kernel}, timeout_s=max(LOAD_TIMEOUT_S, config.timeout_s))
        if not isinstance(loaded, dict) or any(key in loaded for key in _REFUSAL_KEYS):
            return None
        inputs = replace(call, device=torch.device("cpu"), owns_storage=True).build_arguments()[2]
        for (start, *_), contents in zip(entry.input_rows, map(storage_bytes, inputs), strict=True):
            worker.arena_view[start : start + len(contents)] = contents
        (reply,), results = _checked_replies(worker, config, _call_request(op, [entry.request()]), 1)
    except (WorkerDiedError, RejectedError):
        return None
    finally:
        worker.close()
    finding = CaseCheck(
        op, required, entry.case.expect, call, call.run(), reply, results, config.input_bytes, measure_errors=False
    ).verdict()
    return replace(finding, reason=f"with other contents, as in timed calls: {finding.reason}")


def _call_request(op: Operator, cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"do": "call", "op": op.name, "random": op.is_random, "cases": cases}


def _checked_replies(
    worker: KernelWorker, config: WorkerConfig, request: dict[str, Any], count: int
) -> tuple[list[dict[str, Any]], bytearray]:
    """Return the replies to a request and a private copy of the results.

    Raise RejectedError if opforge's harness cannot have written the replies.
    """
    replies = parse_replies(worker.ask(request, cases=count), count)
    if replies is None:
        raise RejectedError(VerdictKind.CONTRACT, MALFORMED_REPLY)
    return replies, bytearray(worker.arena_view[config.input_bytes : results_end(replies, config)])
