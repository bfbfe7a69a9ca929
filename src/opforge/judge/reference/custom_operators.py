"""The judge's view of operators outside ATen: facts from their cases, and their reference."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opforge.cases.tensors import Bytes
from opforge.cases.wire import json_tree
from opforge.errors import CaseSyntaxError
from opforge.judge.batch import Batch, CaseRow
from opforge.judge.kernel_worker import WorkerConfig
from opforge.judge.reference.aten import ReferenceFaultError
from opforge.judge.reference.user import UserReference
from opforge.judge.worker_folders import WorkerFolders
from opforge.ops import CustomOperator
from opforge.sandbox.host.client import Spawner

_MAX_DRAW_CHECK_CASES = 4
"""Cases on which a reference is checked for drawing random numbers."""


@dataclass
class CustomOperators:
    """Keeps the process of one reference, as jobs of one operator mostly follow each other."""

    spawner: Spawner
    config: WorkerConfig
    worker_folders: WorkerFolders | None
    blobs: Mapping[str, Bytes]
    buffer: Bytes
    _reference: UserReference | None = None

    def operator_and_reference(
        self, description: dict[str, Any], name: str, cases: list[CaseRow]
    ) -> tuple[CustomOperator, UserReference]:
        """Return the facts about an operator, and the reference that answers for it."""
        reference = self._reference_for(description)
        op = operator_from_cases(name, cases)
        if reference.uses_rng is None:
            reference.uses_rng = self._uses_rng(op.as_random(), reference, cases[:_MAX_DRAW_CHECK_CASES])
        return op.as_random() if reference.uses_rng else op, reference

    def _reference_for(self, description: dict[str, Any]) -> UserReference:
        if self._reference is None or self._reference.description != description:
            if self._reference is not None:
                self._reference.close()
            self._reference = UserReference(self.spawner, self.config, self.worker_folders, description)
        return self._reference

    def _uses_rng(self, op: CustomOperator, reference: UserReference, cases: list[CaseRow]) -> bool:
        """Whether a reference draws random numbers on any of these cases."""
        device = torch.device(self.config.device)
        for case in cases:
            batch = Batch(op, device, self.config.input_bytes, self.blobs, self.buffer, reference)
            with contextlib.suppress(CaseSyntaxError, MemoryError, KeyError, ValueError, RuntimeError):
                entry = batch.add(case)
                if entry is None or isinstance(entry.answer.raised, ReferenceFaultError):
                    return False
                if entry.answer.used_rng:
                    return True
        return False


def operator_from_cases(name: str, cases: list[CaseRow]) -> CustomOperator:
    """Return an operator with the positional count and keyword names that its cases show."""
    positional = 0
    keywords: dict[str, None] = {}
    for case in cases:
        args, kwargs = json.loads(case.tree or json_tree(case.args))
        positional = max(positional, len(args))
        keywords.update(dict.fromkeys(kwargs))
    return CustomOperator.create(name, positional, keywords)
