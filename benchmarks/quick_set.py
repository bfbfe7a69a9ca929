"""Compare the lines of each package that the quick tests run with those that all tests run.

Run in a development environment with coverage.py (``pip install coverage``). It measures the test processes, the
commands that they start, the fork server and the judges. Confined workers cannot write files and are not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "opforge"
SETS = {"quick": "not gpu and not slow", "slow": "slow and not gpu"}

START = """
import os
if folder := os.environ.get("OPFORGE_COVERAGE"):
    import atexit, coverage
    measured = coverage.Coverage(
        data_file=f"{folder}/data", data_suffix=True, source=[PACKAGE], config_file=False, messages=False
    )
    measured._warn_no_data = False
    measured.start()
    leave = os._exit
    def save():
        try:
            measured.stop()
            measured.save()
        except BaseException:
            pass
    def save_and_leave(code):
        save()
        leave(code)
    os._exit = save_and_leave
    atexit.register(save)
"""
"""Imported by every Python process of the environment: starts the measurement, and saves it however the process ends."""


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Have every Python process of this environment measured that has OPFORGE_COVERAGE set."""
    site = Path(sysconfig.get_path("purelib"))
    files = {
        "opforge_coverage.py": START.replace("PACKAGE", repr(str(PACKAGE))),
        "opforge_coverage.pth": "import opforge_coverage\n",
    }
    try:
        for name, text in files.items():
            (site / name).write_text(text)
        yield
    finally:
        for name in reversed(files):
            (site / name).unlink(missing_ok=True)


def run_tests(which: str, marker: str, data: Path, workers: int, words: list[str]) -> None:
    """Run one set of tests, and keep what was measured in a folder."""
    data.mkdir()
    environment = {**os.environ, "OPFORGE_COVERAGE": str(data.resolve())}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-m", marker, "--timeout", "1800", *words]
    with measuring():
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        print(f"some {which} tests failed under measurement; their lines still count")


def lines_by_file(folders: list[Path]) -> dict[Path, tuple[int, int]]:
    """Return how many lines each file has that can be run, and how many were."""
    found = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
    found.combine([str(file) for folder in folders for file in folder.iterdir()], keep=True)
    counts = {}
    for path in PACKAGE.rglob("*.py"):
        if "template" not in path.parts:
            _, lines, _, missing, _ = found.analysis2(str(path))
            counts[path] = (len(lines), len(lines) - len(missing))
    return counts


def by_package(counts: dict[Path, tuple[int, int]]) -> dict[str, float]:
    """Return the percentage of lines that were run, by package."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, (lines, run) in counts.items():
        first = path.relative_to(PACKAGE).parts[0]
        for name in (first if not first.endswith(".py") else "(top level)", "all"):
            sums[name][0] += lines
            sums[name][1] += run
    return {name: 100 * run / lines for name, (lines, run) in sorted(sums.items()) if lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="keep what is measured here; sets that are there already are not run")
    parser.add_argument("--only", choices=SETS, help="run one set, to be compared later, with the same --data")
    parser.add_argument("tests", nargs="*", help="folders and files of tests [default: all]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work: Path = options.data or Path(folder)
        work.mkdir(exist_ok=True)
        for which, marker in SETS.items():
            if not (work / which).exists() and options.only in (None, which):
                run_tests(which, marker, work / which, options.workers, options.tests)
        if all((work / which).exists() for which in SETS):
            show(work)


def show(work: Path) -> None:
    """Print the percentages side by side."""
    quick = by_package(lines_by_file([work / "quick"]))
    every = by_package(lines_by_file([work / which for which in SETS]))
    print("| package | quick % | all % | lost |\n|---|---|---|---|")
    for name, whole in every.items():
        print(f"| {name} | {quick[name]:.1f} | {whole:.1f} | {whole - quick[name]:.1f} |")


if __name__ == "__main__":
    main()
