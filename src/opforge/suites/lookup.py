"""Find the suite named by the user: a registered name, or a file of recorded calls."""

from __future__ import annotations

import os
from pathlib import Path

from opforge import registry
from opforge.suites.base import Suite


def find_suite(name: str) -> Suite:
    """Return a suite.

    The error for an unknown name suggests similar names; for an unusable file it names the formats.
    """
    if names_a_file(name):
        from opforge.suites.trace import TraceSuite

        return TraceSuite(Path(name))
    suite: Suite = registry.load("suites", name)()
    return suite


def names_a_file(name: str) -> bool:
    """Whether a name means a file, existing or not: suite names have no folder or suffix."""
    return name not in registry.names("suites") and (os.sep in name or "." in name or Path(name).is_file())


def short_name(name: str) -> str:
    """Return a suite's name for use in file names."""
    return Path(name).stem if names_a_file(name) else name
