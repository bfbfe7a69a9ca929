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
from opforge.cases.materialise import Bytes
from opforge.errors import CaseSyntaxError
from opforge.judge.asked import LOAD_LIMIT_S
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.contract import Hearing
from opforge.judge.replies import FORGED, replies_of, results_end
from opforge.judge.verdict import Finding, Outcome
from opforge.judge.workers import DeathError, KernelWorker, WorkerConfig
from opforge.models.process import ModelError, ModelProcess
from opforge.ops import Operator, table

_BLOB_NAME = "calls"
_CASE_ID_FORMAT = "{:016x}"


@dataclass
class Located:
    """The check of the calls of a kernel's operators."""

    calls: int = 0
    """Number of calls in a run of the model."""
    looked_at: int = 0
    first: dict[str, Any] | None = None
    """The first call with a wrong answer; None if each call by itself is within its bound."""
    nearest: float = 0.0
    """The largest ratio of a call's error to its bound."""

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"calls": self.calls, "looked_at": self.looked_at, "first": self.first}
        return row if self.first is not None else {**row, "largest_share_of_bound": self.nearest}


class Locator:
    """Checks the calls of one kernel, which runs in its own worker."""

    def __init__(self, worker: KernelWorker, config: WorkerConfig, kernel: dict[str, Any]) -> None:
        self._worker = worker
        self._config = config
        self._device = torch.device(config.device)
        self._required = dict(kernel["ops"])
        self._buffer: Bytes = np.zeros(1 << 20, np.uint8)
        wire = {name: value for name, value in kernel.items() if name != "ops"}
        worker.ask({"do": "load", "kernel": wire}, timeout_s=max(LOAD_LIMIT_S, config.timeout_s))

    def first_off(self, plain: ModelProcess, ops: Sequence[str]) -> Located:
        """Return the first call of a run at which the kernel's answer is wrong."""
        located = Located()
        for call, blob in _recorded(plain, ops, located):
            facts = table().get(call.get("op", ""))
            if facts is None or "tree" not in call:
                continue
            located.looked_at += 1
            case = CaseRow(
                _CASE_ID_FORMAT.format(call["number"]),
                call["text"],
                json.dumps(call["tree"]),
                Expect.RETURNS,
                Phase.CORRECTNESS,
                _BLOB_NAME,
            )
            finding = self._finding(facts, case, blob)
            if finding.passed or finding.outcome is Outcome.UNSUPPORTED:
                located.nearest = max(located.nearest, _share(finding))
                continue
            located.first = self._described(facts, call, finding)
            return located
        return located

    def _described(self, facts: Operator, call: dict[str, Any], finding: Finding) -> dict[str, Any]:
        row = {name: call[name] for name in ("number", "op", "phase")} | {"case": call["text"]}
        return {**row, **finding.row(), **self._check_seeded_contents(facts, call["text"], finding)}

    def _check_seeded_contents(self, facts: Operator, text: str, finding: Finding) -> dict[str, Any]:
        """Report whether the kernel also fails with seeded contents; not if its process is gone."""
        if finding.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT):
            return {}
        case = CaseRow(_CASE_ID_FORMAT.format(0), text, "", Expect.RETURNS, Phase.CORRECTNESS, "")
        return {"also_with_seeded_contents": not self._finding(facts, case, None).passed}

    def _finding(self, facts: Operator, case: CaseRow, blob: Bytes | None) -> Finding:
        """Judge the kernel on one call."""
        blobs = {} if blob is None else {_BLOB_NAME: blob}
        batch = Batch(facts, self._device, self._config.in_bytes, blobs, self._buffer)
        try:
            placed = batch.add(case)
        except (CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError) as error:
            return Finding(Outcome.UNSUPPORTED, f"the case cannot be made here: {error}")
        if placed is None:
            return Finding(Outcome.UNSUPPORTED, "there is no room for the case")
        batch.copy_to(self._worker.bytes)
        request = {"do": "call", "op": facts.name, "random": facts.random, "cases": [placed.request()]}
        try:
            replies = replies_of(self._worker.ask(request), 1)
        except DeathError as death:
            return Finding(death.outcome, str(death))
        if replies is None:
            return Finding(Outcome.CONTRACT, FORGED)
        results = bytearray(self._worker.bytes[self._config.in_bytes : results_end(replies, self._config)])
        touched = batch.touched(self._worker.bytes)[0]
        required = bool(self._required.get(facts.name, True))
        return Hearing(
            facts,
            required,
            case.expect,
            placed.call,
            placed.answer,
            replies[0],
            results,
            self._config.in_bytes,
            touched,
        ).finding()


def _recorded(plain: ModelProcess, ops: Sequence[str], located: Located) -> Iterator[tuple[dict[str, Any], Bytes]]:
    """Yield the calls of a run in order, with the bytes of their tensors."""
    start, has_more = 0, True
    while has_more:
        reply = plain.ask({"do": "record", "ops": list(ops), "start": start})
        calls, seen = reply.get("calls"), reply.get("seen")
        if not isinstance(calls, list) or not isinstance(seen, int) or not all(isinstance(c, dict) for c in calls):
            raise ModelError(Outcome.CONTRACT, FORGED)
        located.calls = seen
        blob = plain.contents(plain.config.in_bytes, reply.get("used"))
        if blob is None:
            raise ModelError(Outcome.CONTRACT, FORGED)
        for call in calls:
            yield call, blob
        plain.worker.release(len(blob))
        start += len(calls)
        has_more = bool(calls) and start < seen


def _share(finding: Finding) -> float:
    bound = finding.figures.get("bound") or 0.0
    return float(finding.figures.get("kernel_error", 0.0)) / bound if bound else 0.0
