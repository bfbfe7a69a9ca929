"""Scores: what is missing, failed or not judged yet stays in the denominator."""

from __future__ import annotations

import json
import math

import pytest

from opforge.runs.manifest import Manifest
from opforge.runs.rows import ResultRow
from opforge.runs.score import Summary


def manifest(
    operators: int, missing: tuple[str, ...] = (), optional: tuple[str, ...] = (), p: float = 1.0, **plan: object
) -> Manifest:
    fields = {"missing": list(missing), "optional": list(optional), "operators": operators, **plan}
    return Manifest.from_wire({"config": {"p": p}, "plan": fields})


def row(op: str, verdict: str = "passed", **fields: object) -> ResultRow:
    return ResultRow.from_wire({"op": op, "kernel": "k", "verdict": verdict, "reason": "", **fields})


def timed(op: str, speedup: float, low: float | None = None, high: float | None = None, **fields: object) -> ResultRow:
    low, high = low or speedup / 1.1, high or speedup * 1.1
    times = {"speedup": speedup, "speedup_low": low, "speedup_high": high, "case": f"a case of {op}"}
    return row(op, phase="performance", **times, **fields)


def test_missing_and_failed_operators_count():
    rows = [row("a.x"), row("b.x"), row("b.x", "crashed"), row("c.x", "wrong")]
    summary = Summary.from_rows(manifest(4, ("d.x",)), rows)
    assert summary.correctness == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    assert summary.correctness_of_judged == pytest.approx(0.5)
    assert summary.coverage == pytest.approx(3 / 4)
    assert summary.exit_code == 1


def test_an_unfinished_run_is_not_flattered():
    assert Summary.from_rows(manifest(10), [row("a.x")]).correctness == pytest.approx(0.1)


def test_a_declined_overload_is_no_failure_and_no_success():
    rows = [row("a.x"), row("a.y", "unsupported"), row("a.y", raised=1.0)]
    summary = Summary.from_rows(manifest(2, optional=("a.y",)), rows)
    assert summary.declined == ["a.y"]
    assert summary.exit_code == 0
    assert summary.correctness == pytest.approx(0.5)


def test_performance_is_of_right_kernels_and_perf_at_p_of_all():
    fast = {"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    slow = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
    rows = [row("a.x", **fast), row("b.x", **slow), row("c.x", "wrong"), row("c.x", **fast)]
    summary = Summary.from_rows(manifest(4, ("d.x",)), rows)
    assert summary.performance == pytest.approx(1.0)
    assert summary.perf_at_p == pytest.approx(1 / 4)
    low, high = summary.performance_interval
    assert low < 1.0 < high


def test_the_mean_is_over_operators_not_over_cases():
    rows = [timed("a.x", 4.0), timed("a.x", 4.0), timed("a.x", 4.0), timed("b.x", 1.0)]
    summary = Summary.from_rows(manifest(2), rows)
    assert summary.performance == pytest.approx(2.0)
    assert summary.operators["a.x"].speedup == pytest.approx(4.0)


def test_intervals_combine_on_the_logarithmic_scale_with_the_weights_of_the_mean():
    rows = [timed("a.x", 2.0, 1.8, 2.6), timed("a.x", 0.5, 0.45, 0.5), timed("b.x", 3.0, 2.9, 3.3)]
    low, high = Summary.from_rows(manifest(2), rows).performance_interval
    weights = (1 / 4, 1 / 4, 1 / 2)
    centre = sum(w * math.log(s) for w, s in zip(weights, (2.0, 0.5, 3.0), strict=True))
    below = sum((w * math.log(r)) ** 2 for w, r in zip(weights, (2.0 / 1.8, 0.5 / 0.45, 3.0 / 2.9), strict=True)) ** 0.5
    above = sum((w * math.log(r)) ** 2 for w, r in zip(weights, (2.6 / 2.0, 1.0, 3.3 / 3.0), strict=True)) ** 0.5
    assert math.log(low) == pytest.approx(centre - below)
    assert math.log(high) == pytest.approx(centre + above)


def test_one_case_keeps_its_own_interval():
    assert Summary.from_rows(manifest(1), [timed("a.x", 1.5, 1.4, 1.7)]).performance_interval == pytest.approx(
        (1.4, 1.7)
    )


def test_launch_bound_cases_are_scored_apart():
    rows = [timed("a.x", 2.0), timed("a.x", 8.0, launch_bound=True), timed("b.x", 2.0, launch_bound=True)]
    summary = Summary.from_rows(manifest(2), rows)
    scores = summary.scores()
    assert scores["performance"] == pytest.approx(2.0)
    assert scores["performance_operators"] == 1
    assert scores["performance_launch_bound"] == pytest.approx(4.0)  # of 8 and 2
    assert scores["performance_launch_bound_operators"] == 2
    low, high = scores["performance_launch_bound_interval"]
    assert math.log(high / 4.0) == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert low * high == pytest.approx(16.0)
    assert scores["launch_bound_cases"] == 2
    assert (scores["perf_at_p"], scores["perf_at_p_operators"]) == (1.0, 1)  # b.x appears apart alone


def test_a_wrong_kernel_on_small_cases_is_still_a_failure():
    rows = [timed("a.x", 2.0), timed("b.x", 2.0, launch_bound=True), row("b.x", "wrong", phase="correctness")]
    summary = Summary.from_rows(manifest(2), rows)
    assert summary.scores()["performance_launch_bound"] is None
    assert summary.perf_at_p == 0.5


def test_an_alarmed_case_is_no_record_and_is_listed():
    rows = [timed("a.x", 2.0), timed("a.x", 50.0, alarm="faster than light"), timed("b.x", 2.0)]
    rows.append(timed("b.x", 9.0, alarm="", launch_bound=False))
    rows.append(timed("c.x", 70.0, alarm="faster than light", launch_bound=True))
    scores = Summary.from_rows(manifest(3), rows).scores()
    assert scores["performance"] == pytest.approx(math.sqrt(2.0 * math.sqrt(18.0)))
    assert scores["performance_launch_bound"] is None
    assert scores["perf_at_p"] == pytest.approx(1 / 3)  # b.x: an operator with an alarm has not shown anything
    assert scores["alarmed_cases"] == 2
    assert [(a["op"], a["case"]) for a in scores["alarms"]] == [("a.x", "a case of a.x"), ("c.x", "a case of c.x")]


def test_perf_at_p_is_over_all_operators_that_were_to_be_timed():
    rows = [
        timed("fast.x", 2.0),
        timed("slow.x", 0.5),
        row("wrong.x", "wrong", phase="performance"),
        row("crashed.x", "crashed", phase="performance"),
        row("lost.x", phase="performance", notes=["not timed: ATen's own process: it died"]),
        row("untimed.x", phase="correctness"),
        row("declined.x", "unsupported", phase="performance"),
    ]
    summary = Summary.from_rows(manifest(8, ("missing.x",), ("declined.x",)), rows)
    assert summary.perf_at_p == pytest.approx(1 / 7)
    assert summary.scores()["performance_cases"] == 6
    assert summary.scores()["timed_cases"] == 2


def test_the_manifest_knows_what_was_to_be_timed():
    plan = {"performance": ["a.x", "later.x", "missing.x"]}
    summary = Summary.from_rows(manifest(4, ("missing.x", "other.x"), **plan), [timed("a.x", 2.0)])
    assert summary.perf_at_p == pytest.approx(1 / 3)


def test_where_nothing_is_to_be_timed_there_is_no_perf_at_p():
    summary = Summary.from_rows(manifest(2, ("b.x",)), [row("a.x", phase="correctness")])
    assert summary.perf_at_p is None
    assert summary.scores()["perf_at_p_interval"] is None
    assert summary.scores()["perf_curve"] == []


def test_all_wrong_is_a_perf_at_p_of_nothing():
    summary = Summary.from_rows(manifest(1), [row("a.x", "wrong", phase="performance")])
    assert (summary.performance, summary.perf_at_p) == (None, 0.0)


def test_perf_at_p_has_an_interval_and_a_curve():
    rows = [timed("a.x", 1.1, 0.9, 1.3), timed("b.x", 0.95, 0.9, 1.1), timed("c.x", 3.0, 2.5, 3.5), timed("d.x", 0.5)]
    scores = Summary.from_rows(manifest(4), rows).scores()
    assert (scores["perf_at_p"], scores["perf_at_p_interval"]) == (0.5, (0.25, 0.75))
    curve = {point["p"]: (point["low"], point["share"], point["high"]) for point in scores["perf_curve"]}
    assert curve[1.0] == (0.25, 0.5, 0.75)
    assert curve[0.8] == (0.75, 0.75, 0.75)
    assert curve[2.0] == (0.25, 0.25, 0.25)
    assert list(curve) == [0.8, 1.0, 1.2, 1.5, 2.0]


def test_call_times_have_a_score_of_their_own_where_the_headline_is_device_time():
    call = {"speedup": 0.5, "low": 0.4, "high": 0.6}
    scores = Summary.from_rows(manifest(1), [timed("a.x", 2.0, timed="device", call=call)]).scores()
    assert (scores["performance"], scores["performance_call"]) == (2.0, pytest.approx(0.5))
    assert scores["performance_call_interval"] == pytest.approx((0.4, 0.6))
    assert (
        Summary.from_rows(manifest(1), [timed("a.x", 0.5, timed="call", call=call)]).scores()["performance_call"]
        is None
    )


def test_percent_of_light_is_the_median_of_the_cases_that_count():
    light = [{"sol": {"kernel": percent, "aten": 2 * percent}} for percent in (10.0, 20.0, 40.0, 90.0)]
    rows = [timed("a.x", 2.0, **fields) for fields in light[:3]] + [timed("a.x", 2.0, launch_bound=True, **light[3])]
    tally = Summary.from_rows(manifest(1), rows).operators["a.x"]
    assert (tally.sol_percent, tally.aten_sol_percent) == (20.0, 40.0)


def test_what_is_said_of_the_machine_is_said_once():
    notes = [[f"the clock fell to {mhz} MHz: throttled", "strides differ"] for mhz in (1200, 1300)]
    summary = Summary.from_rows(manifest(1), [timed("a.x", 2.0, notes=n) for n in notes])
    assert list(summary.machine_notes.values()) == [("the clock fell to 1200 MHz: throttled", 2)]


def test_scores_are_json():
    rows = [timed("a.x", 2.0, alarm="faster than light"), timed("b.x", 2.0, launch_bound=True)]
    scores = Summary.from_rows(manifest(2), rows).scores()
    assert json.loads(json.dumps(scores, allow_nan=False)).keys() == scores.keys()


def test_nothing_judged():
    assert Summary.from_rows(manifest(1, ("a.x",)), []).exit_code == 5
