"""A second opinion on a wrong output of a timed call: is the kernel wrong on such contents whenever it is asked, or only when it is timed?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from opforge.judge.asked import LOAD_LIMIT_S
from opforge.judge.batch import Placed
from opforge.judge.contract import Hearing
from opforge.judge.replies import replies_of, results_end
from opforge.judge.trees import storage_bytes
from opforge.judge.verdict import Finding
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.ops import Operator

_REFUSALS = ("tried", "error", "tampered", "state")


def asked_apart(
    worker: KernelWorker,
    config: WorkerConfig,
    kernel: dict[str, Any],
    op: Operator,
    placed: Placed,
    turn: int,
    *,
    required: bool,
) -> Finding | None:
    """Judge the answer of a kernel to a case whose contents are turned, from a new worker, which is closed then; None where there is none."""
    call = replace(placed.call, turn=turn)
    try:
        loaded = worker.ask({"do": "load", "kernel": kernel}, timeout_s=max(LOAD_LIMIT_S, config.timeout_s))
        if not isinstance(loaded, dict) or any(word in loaded for word in _REFUSALS):
            return None
        inputs = replace(call, device=torch.device("cpu"), own=True).build()[2]
        for (at, *_), contents in zip(placed.inputs, map(storage_bytes, inputs), strict=True):
            worker.bytes[at : at + len(contents)] = contents
        asked = {"do": "call", "op": op.name, "random": op.random, "cases": [placed.request()]}
        replies = replies_of(worker.ask(asked), 1)
        if replies is None:
            return None
        results = bytearray(worker.bytes[config.in_bytes : results_end(replies, config)])
    except DeathError:
        return None
    finally:
        worker.close()
    finding = Hearing(
        op, required, placed.case.expect, call, call.run(), replies[0], results, config.in_bytes, measure=False
    ).finding()
    return replace(finding, reason=f"with other contents, as timed calls have them: {finding.reason}")
