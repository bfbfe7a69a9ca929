"""Cases of opforge's suites as tests, with inputs in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from BackendBench.opregistry import torch_operator
from BackendBench.suite.base import OpTest
from opforge.cases import Case, Phase, TensorSpec
from opforge.cases.case_files import open_blob
from opforge.cases.tensors import tensor_from_row, write_storage
from opforge.cases.text import parse_arguments
from opforge.cases.wire import decode, encode, spec_row
from opforge.ops import table
from opforge.suites import LoadedSuite


@dataclass(frozen=True)
class CaseTest:
    """A case; ``args`` and ``kwargs`` are made anew each time, with the contents that the judge uses."""

    __test__ = False

    case: Case
    blob: Path | None
    device: str

    @property
    def args(self) -> list[Any]:
        return self._inputs()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._inputs()[1]

    def _inputs(self) -> Any:
        blob = None if self.blob is None else open_blob(self.blob)
        made: dict[str, torch.Tensor] = {}

        def tensor(spec: TensorSpec) -> list[Any]:
            storage = np.zeros(spec.storage_nbytes, np.uint8)
            write_storage(spec, storage, blob, f"{self.case.id}|{len(made)}")
            row = spec_row(spec)
            made[str(len(made))] = tensor_from_row(storage, [0, *row[1:7]]).to(spec.device or self.device)
            return [str(len(made) - 1)]

        args, kwargs = parse_arguments(self.case.args)
        tree = encode([list(args), *kwargs.values()], tensor)
        first, *others = decode(tree, lambda row: made[row[0]])
        return first, dict(zip(kwargs, others, strict=True))


def optests(loaded: LoadedSuite, device: str, is_wanted: Callable[[Case], bool] = lambda _case: True) -> list[OpTest]:
    """Return the operators of a loaded suite with those of their cases that are wanted and can run."""
    found = []
    for name, cases in loaded.cases.items():
        op = table().get(name)
        tests: dict[Phase, list[CaseTest]] = {phase: [] for phase in Phase}
        for case in cases:
            if not case.lost and is_wanted(case):
                tests[case.phase].append(CaseTest(case, loaded.blobs.get(case.blob), device))
        if op is not None and any(tests.values()):
            found.append(OpTest(torch_operator(op), tests[Phase.CORRECTNESS], tests[Phase.PERFORMANCE]))
    return found
