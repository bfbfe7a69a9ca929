"""A run: what to judge, doing it, keeping it, scoring it."""

from opforge.runs.config import RunConfig
from opforge.runs.run import run
from opforge.runs.score import Summary

__all__ = ["RunConfig", "Summary", "run"]
