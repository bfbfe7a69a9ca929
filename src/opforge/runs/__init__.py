"""Runs: configure, execute, store and score."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opforge.runs.config import RunConfig
    from opforge.runs.pipeline import run
    from opforge.runs.score import Summary

__all__ = ["RunConfig", "Summary", "run"]

_MODULE_OF_NAME = {"RunConfig": "config", "Summary": "score", "run": "pipeline"}


def __getattr__(name: str) -> Any:
    """Import names on first use: every command needs the run's settings, but few start a run."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'opforge.runs' has no attribute {name!r}")
    return getattr(import_module(f"opforge.runs.{_MODULE_OF_NAME[name]}"), name)
