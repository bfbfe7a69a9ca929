"""A run as JSON for kernel authors: scores, operators, failures, times.

Its length is bounded, however many cases there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opforge.reports.speed_text import operator_fields
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary
from opforge.runs.speed import CaseSpeed

_MAX_FAILURE_GROUPS = 40
_MAX_CASES_PER_GROUP = 3
_MAX_SHOWN_TIMES = 40
_NUMBERS = re.compile(r"\[[\d, ]*\]|-?\d[\d.e+-]*")
"""Parts in which equal reasons may differ: numbers, and positions in tensors."""
_CASE_FIGURES = ("kernel_error", "aten_error", "bound", "rtol", "atol")


@dataclass
class _Group:
    """Cases of one operator that failed for the same reason, apart from numbers in it."""

    op: str
    verdict: str
    reason: str
    count: int = 0
    cases: list[dict[str, Any]] = field(default_factory=list)
    """The worst cases, each with its own reason."""

    def add(self, row: ResultRow) -> None:
        self.count += 1
        case = {"case": row.case, "id": row.id, "reason": row.reason, "phase": row.phase}
        case |= {name: row.figures[name] for name in _CASE_FIGURES if name in row.figures}
        self.cases = sorted([*self.cases, case], key=_worst_first_key)[:_MAX_CASES_PER_GROUP]

    def as_json(self) -> dict[str, Any]:
        head = {"op": self.op, "verdict": self.verdict, "reason": self.cases[0]["reason"], "count": self.count}
        same_reason = all(case["reason"] == head["reason"] for case in self.cases)
        cases = [{k: v for k, v in case.items() if not (same_reason and k == "reason")} for case in self.cases]
        return {**head, "cases": cases}


def feedback(summary: Summary, rows: Iterable[ResultRow]) -> dict[str, Any]:
    """Return the output of `opforge run --format json`, which is also the feedback to a model."""
    groups: dict[tuple[str, str, str], _Group] = {}
    times: list[dict[str, Any]] = []
    declined = {op for op in summary.declined if op in summary.optional}
    for row in rows:
        if row.verdict != "passed" and row.op not in declined:
            key = row.op, row.verdict, _NUMBERS.sub("#", row.reason)
            groups.setdefault(key, _Group(*key)).add(row)
        elif (time := CaseSpeed.from_row(row)) is not None:
            times = sorted([*times, _time(row, time)], key=lambda t: t["speedup"])[:_MAX_SHOWN_TIMES]
    order = sorted(groups.values(), key=lambda g: (g.reason.startswith("not run"), -g.count, g.op))
    return {
        "scores": summary.scores(),
        "operators": operator_rows(summary),
        "failures": [group.as_json() for group in order[:_MAX_FAILURE_GROUPS]],
        "more_failures": sum(group.count for group in order[_MAX_FAILURE_GROUPS:]),
        "times": times,
    }


def operator_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return a row for each operator, also for those without a kernel."""
    rows: list[dict[str, Any]] = []
    declined = set(summary.declined)
    for _, tally in sorted(summary.operators.items()):
        op = tally.op
        reasons = [{"verdict": v, "reason": r, "count": n} for v, r, n in tally.main_reasons(10)]
        rows.append(
            {
                "op": op,
                "kernel": tally.kernel,
                "cases": tally.total,
                "passed": tally.passed,
                "speedup": tally.speedup,
                **operator_fields(tally),
                "declined": op in declined,
                "weak_to": summary.weak.get(op, []),
                "reasons": reasons,
            }
        )
    return rows + [
        {
            "op": op,
            "kernel": None,
            "cases": 0,
            "passed": 0,
            "speedup": None,
            **operator_fields(None),
            "declined": False,
            "weak_to": [],
            "reasons": [],
        }
        for op in summary.missing
    ]


def _worst_first_key(case: Mapping[str, Any]) -> tuple[float, int]:
    """Sort key of cases: the largest error relative to its bound first, then the shortest text."""
    error, bound = case.get("kernel_error"), case.get("bound")
    excess = error / max(bound, 1e-300) if isinstance(error, int | float) and isinstance(bound, int | float) else 0.0
    return (-excess if excess == excess else float("-inf"), len(case["case"]))  # noqa: PLR0124  # NaN is the worst


def _time(row: ResultRow, time: CaseSpeed) -> dict[str, Any]:
    return {
        "op": row.op,
        "case": row.case,
        "speedup": time.speed.value,
        "speedup_low": time.speed.low,
        "speedup_high": time.speed.high,
        "kernel_us": row.figures.get("kernel_us"),
        "aten_us": time.aten_us,
        "sol_percent": time.sol_percent,
        "aten_sol_percent": time.aten_sol_percent,
        "launch_bound": time.launch_bound,
        "alarm": time.alarm,
    }
