"""The strength of a suite on the terminal: rates by mutant, weak operators with their survivors, scores."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from opforge.reports.strength import print_strength
from opforge.runs.rows import ResultRow
from opforge.runs.strength import Strength


def row(op: str, mutant: str, verdict: str = "passed", seen: str = "same") -> dict[str, Any]:
    return {"op": op, "kernel": mutant, "verdict": verdict, "mutant": seen, "reason": "r", "case": "c"}


def shown(*rows: dict[str, Any]) -> list[str]:
    """Return the lines on a terminal, each with single spaces."""
    strength = Strength("tiny", "cpu", ("f32", "bf16"), "2", "today")
    strength.add(map(ResultRow.from_wire, rows))
    console = Console(file=io.StringIO(), width=140)
    print_strength(console, strength)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_rates_survivors_and_scores():
    lines = shown(
        row("add.Tensor", "zeros", "wrong"),
        row("add.Tensor", "ignored:alpha", seen="changed"),
        row("relu.default", "zeros"),
        row("relu.default", "edge", "crashed"),
        row("abs.default", "edge", seen="void"),
    )
    assert lines[0] == "mutants of ATen on tiny (cpu, f32, bf16)"
    assert [line.rpartition(".")[0] for line in lines if line.startswith("zeros 1/2")] == ["zeros 1/2 0"]
    assert any(line.startswith("edge 1/1 1.000 ") for line in lines)
    assert any(line.startswith("ignored argument 0/1 0.000 ") for line in lines)
    assert "add.Tensor 1/2 ignored:alpha*" in lines
    assert "relu.default 1/2 zeros" in lines
    assert lines[-4:] == [
        "kill rate 0.5000: 2 of 4 mutants (1 wrong, 1 crashed)",
        "equivalent 1 that no input distinguishes from ATen",
        "survivors 2: 1 that differed in no case, 1 that differed and still passed",
        "weak 2 of 2 operators",
    ]


def test_of_many_weak_operators_the_first_are_shown_and_the_rest_counted():
    lines = shown(*(row(f"op{number:02}.x", "zeros") for number in range(43)))
    assert "op39.x 0/1 zeros" in lines
    assert not any(line.startswith("op40.x") for line in lines)
    assert "… and 3 more weak operators; `--format json` lists all" in lines
    assert "kill rate 0.0000: 0 of 43 mutants (none)" in lines


def test_a_suite_that_kills_all_has_no_weak_operators():
    lines = shown(row("relu.default", "zeros", "wrong"))
    assert not any("weak operator" in line for line in lines)
    assert lines[-1] == "weak 0 of 1 operators"
