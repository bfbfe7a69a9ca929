"""Order and group tests by their measured durations, so that workers end at the same time.

A group is what one worker runs in one go: a file, whose tests share fixtures, a folder in ``TOGETHER``, or a single test
of a file in ``APART``.
The groups that take longest begin. ``make durations`` measures anew: pytest then gets ``--store-durations``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FILE = Path(__file__).parent / "durations.json"
APART = {"tests/test_docs.py"}
"""Files whose tests share nothing that is costly."""
TOGETHER = ("tests/edge",)
"""Folders whose files share a process: it imports ExecuTorch once for each test worker that asks."""
_LEAST_S = 0.5
"""Groups that take less are not worth a line in the file."""


class LongestFirst(LoadScopeScheduling):
    """Gives each worker a group at a time, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # xdist's own order is by the number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)  # with `-p no:xdist` there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return LongestFirst(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help=f"write tests/{FILE.name} from this run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Store())


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return nodeid if file in APART else folder if folder in TOGETHER else file


@pytest.hookimpl(trylast=True)  # when the tests that are not wanted are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups that take longest; within a group the order stays."""
    known = _stored()
    sets = {(group_of(item.nodeid), _set_of(item.get_closest_marker("slow"))) for item in items}
    seconds: defaultdict[str, float] = defaultdict(float)
    for group, which in sets:
        seconds[group] += known[which].get(group, 0.0)
    items.sort(key=lambda item: -seconds[group_of(item.nodeid)])


def _set_of(slow: object) -> str:
    return "slow" if slow else "quick"


def _stored() -> dict[str, dict[str, float]]:
    """Return seconds by set and group."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text()) if FILE.exists() else {"quick": {}, "slow": {}}
    return found


class _Store:
    """Adds up what the tests of each group take, and writes it at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, defaultdict[str, float]] = {"quick": defaultdict(float), "slow": defaultdict(float)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_set_of("slow" in report.keywords)][group_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = _stored()
        for which, measured in self._seconds.items():
            if measured:  # a run of one set leaves the other's durations as they are
                rows = {group: round(s, 1) for group, s in measured.items() if s >= _LEAST_S}
                known[which] = dict(sorted(rows.items()))
        FILE.write_text(json.dumps(known, indent=1) + "\n")
