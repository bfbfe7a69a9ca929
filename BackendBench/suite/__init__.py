"""Suites under their known names: tests with inputs in this process, for ``BackendBench.eval``."""

from importlib import import_module
from typing import Any

from .base import OpTest, Test, TestSuite

_MODULES = {
    "CustomOpsTestSuite": "custom_ops",
    "FactoTestSuite": "facto",
    "OpInfoTestSuite": "opinfo",
    "SmokeTestSuite": "smoke",
    "TorchBenchOpTest": "torchbench",
    "TorchBenchTestSuite": "torchbench",
    "randn": "smoke",
}
__all__ = ["OpTest", "Test", "TestSuite", *_MODULES]  # noqa: PLE0604  # strings


def __getattr__(name: str) -> Any:
    """Import suites on first use: they need torch, and a user's ``gen_input.py`` needs only ``Test``."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
