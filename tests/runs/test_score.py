"""Scores: what is missing, failed or not judged yet stays in the denominator."""

from __future__ import annotations

import pytest

from opforge.runs.score import Summary


def manifest(operators: int, missing: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict:
    return {
        "config": {"p": 1.0},
        "plan": {"missing": list(missing), "optional": list(optional), "operators": operators},
    }


def row(op: str, verdict: str = "passed", **fields: object) -> dict:
    return {"op": op, "kernel": "k", "verdict": verdict, "reason": "", **fields}


def test_missing_and_failed_operators_count():
    rows = [row("a.x"), row("b.x"), row("b.x", "crashed"), row("c.x", "wrong")]
    summary = Summary.of(manifest(4, ("d.x",)), rows)
    assert summary.correctness == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    assert summary.correctness_of_judged == pytest.approx(0.5)
    assert summary.coverage == pytest.approx(3 / 4)
    assert summary.exit_code == 1


def test_an_unfinished_run_is_not_flattered():
    assert Summary.of(manifest(10), [row("a.x")]).correctness == pytest.approx(0.1)


def test_a_declined_overload_is_no_failure_and_no_success():
    rows = [row("a.x"), row("a.y", "unsupported"), row("a.y", raised=1.0)]
    summary = Summary.of(manifest(2, optional=("a.y",)), rows)
    assert summary.declined == ["a.y"]
    assert summary.exit_code == 0
    assert summary.correctness == pytest.approx(0.5)


def test_performance_is_of_right_kernels_and_perf_at_p_of_all():
    fast = {"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    slow = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
    rows = [row("a.x", **fast), row("b.x", **slow), row("c.x", "wrong"), row("c.x", **fast)]
    summary = Summary.of(manifest(4, ("d.x",)), rows)
    assert summary.performance == pytest.approx(1.0)
    assert summary.perf_at_p == pytest.approx(1 / 4)
    low, high = summary.performance_interval
    assert low < 1.0 < high


def test_nothing_judged():
    assert Summary.of(manifest(1, ("a.x",)), []).exit_code == 5
