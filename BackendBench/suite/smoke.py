"""The suite ``smoke``: one small test of relu, and one to time."""

from collections.abc import Callable
from typing import Any

import torch

from .base import OpTest, Test, TestSuite


def randn(*args: Any, **kwargs: Any) -> Callable[[], torch.Tensor]:
    """Return a function that makes a new ``torch.randn`` tensor each time."""
    return lambda: torch.randn(*args, **kwargs)


SmokeTestSuite = TestSuite("smoke", [OpTest(torch.ops.aten.relu.default, [Test(randn(2))], [Test(randn(1024, 1024))])])
