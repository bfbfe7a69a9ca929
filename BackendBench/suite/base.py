"""``from BackendBench.suite.base import Test``."""

from opforge import Test

__all__ = ["Test"]
