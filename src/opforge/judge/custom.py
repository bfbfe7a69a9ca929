"""The judge's view of operators outside ATen: facts from their cases, and their reference."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.encoding import tree_of
from opforge.cases.materialise import Bytes
from opforge.errors import CaseSyntaxError
from opforge.judge.asked import Reference
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.reference import ReferenceFaultError
from opforge.judge.rooms import Rooms
from opforge.judge.workers import WorkerConfig
from opforge.ops import CustomOperator
from opforge.sandbox.client import Spawner

_MAX_DRAW_CHECK_CASES = 4
"""Cases on which a reference is checked for drawing random numbers."""


@dataclass
class CustomOperators:
    """Keeps the process of one reference, as jobs of one operator mostly follow each other."""

    spawner: Spawner
    config: WorkerConfig
    rooms: Rooms | None
    blobs: Mapping[str, Bytes]
    buffer: Bytes
    _reference: Reference | None = None

    def facts(self, described: dict[str, Any], name: str, cases: list[CaseRow]) -> tuple[CustomOperator, Reference]:
        """Return the facts about an operator, and the reference that answers for it."""
        reference = self._of(described)
        op = shown_by(name, cases)
        if reference.draws is None:
            reference.draws = self._draws(op.drawing(), reference, cases[:_MAX_DRAW_CHECK_CASES])
        return op.drawing() if reference.draws else op, reference

    def _of(self, described: dict[str, Any]) -> Reference:
        if self._reference is None or self._reference.described != described:
            if self._reference is not None:
                self._reference.close()
            self._reference = Reference(self.spawner, self.config, self.rooms, described)
        return self._reference

    def _draws(self, op: CustomOperator, reference: Reference, cases: list[CaseRow]) -> bool:
        """Whether a reference draws random numbers on any of these cases."""
        device = torch.device(self.config.device)
        for case in cases:
            batch = Batch(op, device, self.config.in_bytes, self.blobs, self.buffer, reference)
            with contextlib.suppress(CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError):
                placed = batch.add(case)
                if placed is None or isinstance(placed.answer.raised, ReferenceFaultError):
                    return False
                if placed.answer.drew:
                    return True
        return False


def shown_by(name: str, cases: list[CaseRow]) -> CustomOperator:
    """Return an operator with the positional count and keyword names that its cases show."""
    positional = 0
    keywords: dict[str, None] = {}
    for case in cases:
        args, kwargs = json.loads(case.tree or tree_of(case.args))
        positional = max(positional, len(args))
        keywords.update(dict.fromkeys(kwargs))
    return CustomOperator.of(name, positional, keywords)
