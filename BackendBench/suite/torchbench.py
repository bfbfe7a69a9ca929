"""``TorchBenchTestSuite``: recorded calls, opforge's own or those of a file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from BackendBench.opregistry import get_operator
from BackendBench.suite.cases import optests
from BackendBench.utils import deserialize_args
from opforge.cases.text import parse_arguments
from opforge.errors import OpforgeError
from opforge.ops import table
from opforge.suites.base import SuiteOptions
from opforge.suites.case_selection import CaseSelection
from opforge.suites.torchbench import TorchbenchSuite
from opforge.suites.trace import TraceSuite
from opforge.traces.call_cost import input_bytes

from .base import TestSuite


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TorchBenchOpTest:
    """An operator with calls as text, the largest first; each is for correctness and to be timed."""

    __test__ = False

    def __init__(self, op: str, inputs: Sequence[str], topn: int | None = None) -> None:
        self.op = get_operator(op)
        self.inputs = inputs
        self.topn = topn

    def tests(self) -> list[str]:
        """Return the calls as text, the largest first."""
        return sorted(self.inputs, key=_input_bytes, reverse=True)[: self.topn]

    @property
    def correctness_tests(self) -> Iterator[_Call]:
        return (_Call(*deserialize_args(text)) for text in self.tests())

    performance_tests = correctness_tests


class TorchBenchTestSuite(TestSuite):
    """Recorded calls by operator: of opforge's suite, or of a trace, an operator-input log or a table."""

    def __init__(
        self,
        name: str,
        filename: str | Path | None = None,
        filter: Iterable[str] | None = None,  # noqa: A002
        topn: int | None = None,
        check_overhead_dominated_ops: bool = False,
    ) -> None:
        if check_overhead_dominated_ops:
            raise OpforgeError(
                "calls cannot be selected by overhead: `opforge run` gives launch-bound calls a score of their own"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        wanted = None if filter is None else frozenset(op.name for op in table().select(list(filter)))
        suite = TraceSuite(Path(filename)) if filename else TorchbenchSuite()
        options = SuiteOptions(device, ops=wanted, selection=CaseSelection(topn=topn))
        self.topn = topn
        super().__init__(name, optests(suite.load(options), device))


def _input_bytes(text: str) -> int:
    return input_bytes(parse_arguments(text))
