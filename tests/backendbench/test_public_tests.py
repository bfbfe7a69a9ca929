"""The tool that runs BackendBench's public tests against the layer, on a made-up checkout."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

TOOL = ROOT / "tools" / "backendbench_tests.py"
TESTS = """
import pytest
from BackendBench.suite.base import Test

def test_ours():
    assert "opforge" in Test.__module__

def test_theirs():
    assert Test.__module__ == "BackendBench.suite.base", "not theirs"

@pytest.mark.skip
def test_gpu():
    pass
"""


def test_it_counts_and_names_failures(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_suite.py").write_text(TESTS)
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    failure, counts, total = done.stdout.splitlines()
    assert failure.startswith("failure test_suite test_theirs: AssertionError: not theirs")
    assert counts.split() == ["test_suite", "1", "failure,", "1", "passed,", "1", "skipped"]
    assert total == "1 of 2 passed (50%), 1 skipped"
    empty = subprocess.run([sys.executable, TOOL, tmp_path / "test"], capture_output=True, text=True, check=False)
    assert (empty.returncode, "is no checkout of BackendBench" in empty.stderr) == (2, True)
