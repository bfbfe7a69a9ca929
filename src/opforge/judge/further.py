"""Further checks of a kernel, beside its cases.

Gradients; a wrong answer again, alone and after a wait; contents of a timed call in a new process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opforge.judge.asked import LOAD_LIMIT_S
from opforge.judge.batch import Placed
from opforge.judge.contract import Hearing
from opforge.judge.reference import Answer, Call
from opforge.judge.replies import FORGED, replies_of, results_end
from opforge.judge.trees import storage_bytes
from opforge.judge.verdict import Finding, NotRightError, Outcome
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.ops import Operator

_LINGER_S = 0.1
_REFUSAL_KEYS = ("tried", "error", "tampered", "state")


def gradients(
    worker: KernelWorker, config: WorkerConfig, op: Operator, placed: Placed, call: Call, aten: Answer
) -> Finding | None:
    """Judge the gradients through an operator with the kernel installed; None if they are right."""
    request = {"do": "gradient", "op": op.name, "case": placed.request()}
    try:
        (reply,), results = _answers(worker, config, request, 1)
    except NotRightError as error:
        return error.finding
    gradient_call = replace(call, own=False)
    finding = Hearing(
        op, True, placed.case.expect, gradient_call, aten, reply, results, config.in_bytes, measure=False
    ).finding()  # fmt: skip
    return None if finding.passed else replace(finding, reason=f"gradients through the kernel: {finding.reason}")


def lingering(worker: KernelWorker, config: WorkerConfig, placed: Placed, hearing: Hearing) -> Finding | None:
    """Repeat a call with a wrong answer by itself, and wait before reading the result.

    This shows results that are written late, or depend on other calls.
    """
    request = placed.request()
    cases = [request, request, {**request, "linger_s": _LINGER_S}]
    try:
        replies, results = _answers(worker, config, _calls(hearing.op, cases), len(cases))
    except NotRightError as error:
        return error.finding
    passed = [replace(hearing, reply=r, results=results, notes=[], values=[]).finding().passed for r in replies]
    if passed == [False, False, True]:
        late = f"wrong at once, three times, and right when looked at {_LINGER_S:g} s later"
        return Finding(Outcome.CHEATED, f"{late}: the result is written after the call returned")
    if all(passed):
        alone = "wrong after other calls, and right three times when called by itself"
        return Finding(Outcome.CONTRACT, f"{alone}: the answer depends on how calls follow each other")
    return None


def asked_apart(
    worker: KernelWorker,
    config: WorkerConfig,
    kernel: dict[str, Any],
    op: Operator,
    placed: Placed,
    renewal: int,
    *,
    required: bool,
) -> Finding | None:
    """Judge a kernel's answer to a case with renewed contents in a new worker, and close it.

    Return None where there is no answer to judge.
    """
    call = replace(placed.call, renewal=renewal)
    try:
        loaded = worker.ask({"do": "load", "kernel": kernel}, timeout_s=max(LOAD_LIMIT_S, config.timeout_s))
        if not isinstance(loaded, dict) or any(key in loaded for key in _REFUSAL_KEYS):
            return None
        inputs = replace(call, device=torch.device("cpu"), own=True).build()[2]
        for (start, *_), contents in zip(placed.inputs, map(storage_bytes, inputs), strict=True):
            worker.bytes[start : start + len(contents)] = contents
        (reply,), results = _answers(worker, config, _calls(op, [placed.request()]), 1)
    except (DeathError, NotRightError):
        return None
    finally:
        worker.close()
    finding = Hearing(
        op, required, placed.case.expect, call, call.run(), reply, results, config.in_bytes, measure=False
    ).finding()
    return replace(finding, reason=f"with other contents, as timed calls have them: {finding.reason}")


def _calls(op: Operator, cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {"do": "call", "op": op.name, "random": op.random, "cases": cases}


def _answers(
    worker: KernelWorker, config: WorkerConfig, request: dict[str, Any], count: int
) -> tuple[list[dict[str, Any]], bytearray]:
    """Return the replies to a request and a private copy of the results.

    Raise NotRightError if opforge's harness cannot have written the replies.
    """
    replies = replies_of(worker.ask(request, cases=count), count)
    if replies is None:
        raise NotRightError(Outcome.CONTRACT, FORGED)
    return replies, bytearray(worker.bytes[config.in_bytes : results_end(replies, config)])
