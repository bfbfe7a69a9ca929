"""``OpInfoTestSuite``: the calls that opforge records from PyTorch's OpInfo."""

from collections.abc import Iterable

import torch

from BackendBench.suite.cases import optests
from opforge.cases import Case, Expect
from opforge.cases.wire import SHORT_DTYPES
from opforge.ops import table
from opforge.suites.base import SuiteOptions
from opforge.suites.opinfo.suite import OpInfoSuite

from .base import TestSuite


class OpInfoTestSuite(TestSuite):
    """Valid calls of each operator, for correctness. Recording takes about a minute, once per device and dtype."""

    def __init__(self, name: str, device: str, dtype: torch.dtype, filter: Iterable[str] | None = None) -> None:  # noqa: A002
        wanted = None if filter is None else frozenset(op.name for op in table().select(list(filter)))
        loaded = OpInfoSuite().load(SuiteOptions(device, (SHORT_DTYPES[dtype],), wanted))
        super().__init__(name, optests(loaded, device, _is_valid))


def _is_valid(case: Case) -> bool:
    return case.expect is Expect.RETURNS
