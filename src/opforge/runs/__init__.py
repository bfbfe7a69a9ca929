"""A run: what to judge, doing it, keeping it, scoring it."""

from opforge.runs.conduct import run
from opforge.runs.config import RunConfig
from opforge.runs.score import Summary

__all__ = ["RunConfig", "Summary", "run"]
