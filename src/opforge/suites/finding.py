"""Find a suite by what a user typed: a registered name, or a file of recorded calls."""

from __future__ import annotations

import os
from pathlib import Path

from opforge import registry
from opforge.suites.base import Suite


def find_suite(name: str) -> Suite:
    """Return a suite; a misspelt name is answered with its nearest neighbours, a file that holds no calls with what it should hold."""
    if is_file(name):
        from opforge.suites.trace import TraceSuite

        return TraceSuite(Path(name))
    suite: Suite = registry.load("suites", name)()
    return suite


def is_file(name: str) -> bool:
    """Whether a name is that of a file, there or not: it has a folder or an ending, which names of suites have not."""
    return name not in registry.names("suites") and (os.sep in name or "." in name or Path(name).is_file())


def short_name(name: str) -> str:
    """Return what a suite is called in names of files."""
    return Path(name).stem if is_file(name) else name
