"""Suites: sources of test cases."""

from opforge.suites.base import LoadedSuite, Suite, SuiteOptions

__all__ = ["LoadedSuite", "Suite", "SuiteOptions"]
