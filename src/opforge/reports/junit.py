"""JUnit XML, written as a stream: memory use does not grow with the number of cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from opforge.judge.verdict import VerdictKind
from opforge.reports.escape import escape_controls
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary

_MAX_NAME_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class TestCase:
    """One line of a JUnit report."""

    __test__ = False  # not a pytest test class

    class_name: str
    name: str
    status: str = ""
    """Empty if it passed; else ``failure``, ``error`` or ``skipped``."""
    error_type: str = ""
    text: str = ""

    def lines(self) -> Iterator[str]:
        head = f"    <testcase classname={_attribute(self.class_name)} name={_attribute(self.name)}"
        if not self.status:
            yield f"{head}/>\n"
            return
        kind = f" type={_attribute(self.error_type)}" if self.status != "skipped" else ""
        yield f"{head}>\n"
        yield (
            f"      <{self.status}{kind} "
            f"message={_attribute(self.text)}>{escape(escape_controls(self.text))}</{self.status}>\n"
        )
        yield "    </testcase>\n"


def document(name: str, cases: Iterable[TestCase], counts: dict[str, int]) -> Iterator[str]:
    """Yield a report; ``counts`` gives the number of tests, failures, errors and skipped ones."""
    attributes = "".join(
        f" {count_name}={_attribute(str(counts.get(count_name, 0)))}"
        for count_name in ("tests", "failures", "errors", "skipped")
    )
    yield '<?xml version="1.0" encoding="UTF-8"?>\n'
    yield f"<testsuites name={_attribute(name)}{attributes}>\n"
    yield f"  <testsuite name={_attribute(name)}{attributes}>\n"
    for case in cases:
        yield from case.lines()
    yield "  </testsuite>\n</testsuites>\n"


def count_by_status(cases: Iterable[TestCase]) -> dict[str, int]:
    """Return the number of tests, in total and by status."""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    names = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for case in cases:
        counts["tests"] += 1
        if case.status:
            counts[names[case.status]] += 1
    return counts


def run_document(manifest: Manifest, summary: Summary, rows: Iterable[ResultRow]) -> Iterator[str]:
    """Yield a run as JUnit: a test per verdict, and a skipped one per operator without a kernel."""
    declined = frozenset(summary.declined)

    def cases() -> Iterator[TestCase]:
        for row in rows:
            yield _test_case(row, declined)
        for op in summary.missing:
            yield TestCase(op, "kernel", "skipped", text="the backend has no kernel for it")

    return document(f"opforge {manifest.backend} on {manifest.suite}", cases(), _counts(summary))


def _test_case(row: ResultRow, declined: frozenset[str]) -> TestCase:
    name = f"{row.phase} {row.id} {row.case}"[:_MAX_NAME_CHARACTERS]
    group = f"{row.op}.{row.kernel}"
    if row.verdict == VerdictKind.PASSED:
        return TestCase(group, name)
    return TestCase(group, name, _status(row.verdict, row.op in declined), row.verdict, row.reason)


def _status(verdict: str, declined: bool) -> str:
    """Return the JUnit status of a verdict; overloads that a kernel declined are skipped."""
    if declined:
        return "skipped"
    return "error" if verdict in (VerdictKind.ERROR, VerdictKind.CRASHED, VerdictKind.TIMED_OUT) else "failure"


def _counts(summary: Summary) -> dict[str, int]:
    counts = {"tests": len(summary.missing), "skipped": len(summary.missing), "failures": 0, "errors": 0}
    declined = frozenset(summary.declined)
    names = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for tally in summary.operators.values():
        for verdict, count in tally.verdicts.items():
            counts["tests"] += count
            if verdict != VerdictKind.PASSED:
                counts[names[_status(verdict, tally.op in declined)]] += count
    return counts


def _attribute(text: str) -> str:
    return quoteattr(escape_controls(text))
