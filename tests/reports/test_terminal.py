"""A run on the terminal: what is said besides the table of operators."""

from __future__ import annotations

import io

from rich.console import Console

from opforge.reports.terminal import print_run
from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary
from tests.runs.written import manifest, verdict


def shown(made: dict, rows: list[dict]) -> list[str]:
    console = Console(file=io.StringIO(), width=140)
    about = Manifest.from_wire(made)
    print_run(console, about, Summary.from_rows(about, map(ResultRow.from_wire, rows)))
    return console.file.getvalue().splitlines()


def test_hints_are_given_where_a_kernel_is_not_right():
    rows = [verdict("relu.default", "wrong"), verdict("abs.default")]
    made = manifest(rows)
    for kernel in made["plan"]["kernels"]:
        kernel["hints"] = ["catches all exceptions", "has [two] of them"]
    lines = shown(made, rows)
    assert [line for line in lines if line.startswith("hint")] == [
        "hint relu_1 catches all exceptions; has [two] of them"
    ]


def test_two_reasons_are_shown_and_others_counted():
    reasons = ("too large", "too small", "of another shape", "of another dtype")
    lines = shown(*_of([verdict("relu.default", "wrong", number=n, reason=text) for n, text in enumerate(reasons)]))
    start = lines.index("relu.default (relu_1)")
    assert lines[start + 1 : start + 4] == ["  1× wrong: too large", "  1× wrong: too small", "  and 2 other reasons"]


def test_samples_that_are_no_cases_are_counted_unless_operators_were_chosen():
    rows = [verdict("relu.default")]
    said = "2 kinds of samples could not be converted to cases; see OVERALL_SUMMARY.md"
    assert said in shown(manifest(rows, losses=["a", "b"]), rows)
    assert said not in shown(manifest(rows, losses=["a", "b"], config={"ops": ["relu"]}), rows)


def _of(rows: list[dict]) -> tuple[dict, list[dict]]:
    return manifest(rows), rows
