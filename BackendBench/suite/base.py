"""``Test`` is opforge's; a suite is a list of operators with their tests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from opforge import Test

__all__ = ["OpTest", "Test", "TestSuite"]


@dataclass
class OpTest:
    """An operator and its tests; each test has ``args`` and ``kwargs``."""

    __test__ = False

    op: Any
    correctness_tests: Iterable[Any]
    performance_tests: Iterable[Any]


class TestSuite:
    """Operators with their tests, under a name."""

    __test__ = False

    def __init__(self, name: str, optests: Iterable[Any]) -> None:
        self.name = name
        self.optests = optests

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optests)
