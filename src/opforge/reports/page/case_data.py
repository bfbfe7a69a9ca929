"""Compact form of a run's cases, for its page.

Cases are compressed as they arrive, by operator. The points of the charts are columns.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from opforge.judge.verdict import VerdictKind
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary

_CHUNK = 128
"""Number of an operator's cases that are compressed together; this takes a tenth of the memory."""
_FIELDS = frozenset({
    "id", "phase", "verdict", "case", "source", "reason", "notes", "variants",
    "kernel_error", "aten_error", "bound", "rtol", "atol",
    "kernel_residual", "aten_residual", "residual_bound", "draws", "z", "z_limit", "identical_draws",
    "timed", "kernel_us", "aten_us", "speedup", "speedup_low", "speedup_high", "rounds", "launch_bound", "alarm",
    "sol_bytes", "sol_flops", "sol_us", "sol_bound", "sol_kernel", "sol_aten",
})  # fmt: skip
_OUTCOME_NUMBERS = {outcome.value: number for number, outcome in enumerate(VerdictKind)}
NOT_POSITIVE, INFINITE = -32768, 32767
"""Stand for points without a logarithm: zero or less, and infinity."""


def json_value(value: Any) -> Any:
    """Return a value for JSON: floats with six digits, non-finite ones as their names."""
    if isinstance(value, dict):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return _figure(value)


def _figure(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.6g}")


def strict_json(value: Any) -> str:
    """Return strict JSON in ASCII."""
    return json.dumps(json_value(value), separators=(",", ":"), allow_nan=False)


def pack(value: Any) -> str:
    """Return a value packed for the page: JSON, deflated, in base64."""
    return _deflate(strict_json(value))


def _deflate(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


@dataclass
class _PackedCases:
    """The cases of one operator, or of one kernel if kernels are scored separately."""

    chunks: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def add(self, row: ResultRow) -> None:
        self.waiting.append(_case_json(row))
        if len(self.waiting) >= _CHUNK:
            self.chunks.append(_joined(self.waiting))
            self.waiting = []

    def packed(self) -> list[str]:
        return [*self.chunks, _joined(self.waiting)] if self.waiting else self.chunks


def _case_json(row: ResultRow) -> str:
    """Return the fields of a row that the page shows, as JSON, without empty ones."""
    sol = row.figures.get("sol") or {}
    figures = (*row.wire().items(), *((f"sol_{name}", value) for name, value in sol.items()))
    kept = {name: _figure(value) for name, value in figures if name in _FIELDS and value not in (None, "", [])}
    return json.dumps(kept, separators=(",", ":"), allow_nan=False)


def _joined(rows: list[str]) -> str:
    return _deflate(f"[{','.join(rows)}]")


@dataclass
class _ScatterPlot:
    """A scatter plot over all cases: logarithms in hundredths, with the operator of each point."""

    unit: array[int] = field(default_factory=lambda: array("l"))
    x: array[int] = field(default_factory=lambda: array("h"))
    y: array[int] = field(default_factory=lambda: array("h"))
    verdict: array[int] = field(default_factory=lambda: array("b"))

    def add(self, unit: int, x: float, y: float, verdict: str) -> None:
        self.unit.append(unit)
        self.x.append(_log10_hundredths(x))
        self.y.append(_log10_hundredths(y))
        self.verdict.append(_OUTCOME_NUMBERS[verdict])

    def as_json(self) -> dict[str, list[int]]:
        return {name: list(getattr(self, name)) for name in ("unit", "x", "y", "verdict")}


def _log10_hundredths(value: float) -> int:
    if value <= 0:
        return NOT_POSITIVE
    return round(100 * math.log10(value)) if math.isfinite(value) else INFINITE


@dataclass
class CaseData:
    """All cases of a run; rows are added one by one, and only their packed form is kept."""

    unit_numbers: dict[str, int] = field(default_factory=dict)
    """Number of each operator (or kernel, if those are scored separately), by first row."""
    cases: list[_PackedCases] = field(default_factory=list)
    errors: _ScatterPlot = field(default_factory=_ScatterPlot)
    roofline: _ScatterPlot = field(default_factory=_ScatterPlot)

    def add(self, row: ResultRow, summary: Summary) -> None:
        """Add one row."""
        unit = self.unit_numbers.setdefault(summary.unit_of(row), len(self.unit_numbers))
        if unit == len(self.cases):
            self.cases.append(_PackedCases())
        self.cases[unit].add(row)
        self._add_points(unit, row)

    def _add_points(self, unit: int, row: ResultRow) -> None:
        error, bound = row.kernel_error, row.bound
        if error is not None and bound is not None and bound > 0 and not math.isnan(error):
            self.errors.add(unit, bound, error, row.verdict)
        sol, time_us = row.sol, row.figures.get("kernel_us")
        if time_us and sol is not None and sol.bytes and sol.flops:
            self.roofline.add(unit, sol.flops / sol.bytes, sol.flops / time_us * 1e6, row.verdict)

    def blob(self, name: str) -> list[str] | None:
        """Return data that the page loads on demand: ``errors``, ``roofline`` or ``unit:N``."""
        if name in ("errors", "roofline"):
            points: _ScatterPlot = getattr(self, name)
            return [pack(points.as_json())]
        kind, _, number = name.partition(":")
        if kind != "unit" or not number.isdecimal() or int(number) >= len(self.cases):
            return None
        return self.cases[int(number)].packed()

    def names(self) -> list[str]:
        return ["errors", "roofline", *(f"unit:{number}" for number in range(len(self.cases)))]
