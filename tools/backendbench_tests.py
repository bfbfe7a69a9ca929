"""Run the test files of a BackendBench checkout against our layer, and count: backendbench_tests.py CHECKOUT.

The tests are copied to an empty folder, so that `BackendBench` is ours. Exits with 1 if fewer than 80 % of the tests
that ran have passed; tests that BackendBench itself skips here (no GPU, no key) are not counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WANTED_SHARE = 0.8
_KINDS = ("failure", "error", "skipped")


def main(checkout: Path) -> int:
    """Run the tests; print a line for each file and for each failure; return the exit code."""
    if not (checkout / "test").is_dir():
        print(f"{checkout} is no checkout of BackendBench: it has no folder test/", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="backendbench-tests-") as temporary:
        folder = Path(temporary)
        shutil.copytree(checkout / "test", folder / "test")
        report = folder / "report.xml"
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "--continue-on-collection-errors",
            "test",
        ]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *sys.argv[2:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not report.exists():
            print(f"pytest ended with {done.returncode} and wrote no report", file=sys.stderr)
            return 2
        return _show(report)


def _show(report: Path) -> int:
    counts: dict[str, Counter[str]] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  # our own report
        file = (case.get("classname") or case.get("name", "")).removeprefix("test.").partition(".")[0]
        kind, message = _outcome(case)
        counts.setdefault(file, Counter())[kind] += 1
        if kind in ("failure", "error"):
            print(f"{kind} {file} {case.get('name')}: {message}")
    for file, found in sorted(counts.items()):
        print(f"{file:36} " + ", ".join(f"{count} {kind}" for kind, count in sorted(found.items())))
    total = sum(counts.values(), Counter())
    ran = total.total() - total["skipped"]
    share = total["passed"] / ran if ran else 0.0
    print(f"{total['passed']} of {ran} passed ({share:.0%}), {total['skipped']} skipped")
    return 0 if share >= _WANTED_SHARE else 1


def _outcome(case: ET.Element) -> tuple[str, str]:
    for kind in _KINDS:
        if (found := case.find(kind)) is not None:
            return kind, (found.get("message") or "").partition("\n")[0][:200]
    return "passed", ""


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
