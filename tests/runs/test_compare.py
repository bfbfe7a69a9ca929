"""What `opforge compare` says of two runs, and what it does not: runs written by hand, and simulated noise with a seed."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from opforge.cli.main import call
from opforge.errors import RunDirectoryError
from opforge.runs.compare import significance
from opforge.runs.compare.comparison import ChangeKind, compare
from opforge.runs.compare.compatible import IncomparableError
from opforge.runs.speed import Ratio
from tests.runs.written import timed, verdict, write

RULERS = [f"ruler{n}.x" for n in range(12)]


def steady() -> list[dict]:
    """Return the lines of kernels that do not change, to learn from that there is no noise."""
    return [timed(op, 1.0) for op in RULERS]


def held(tmp_path, before: list[dict], after: list[dict], *, edited: tuple[str, ...] = (), **options):
    """Return the comparison of two runs in which some kernels were edited."""
    one = write(tmp_path / "before", before, **options.pop("one", {}))
    other = write(tmp_path / "after", after, digests=dict.fromkeys(edited, "edited"), **options.pop("other", {}))
    return compare(one, other, **options)


def named(comparison) -> dict[str, ChangeKind]:
    return {d.unit: d.kind for d in comparison.differences}


def test_nothing_has_changed(tmp_path):
    comparison = held(tmp_path, steady(), steady())
    assert comparison.differences == ()
    assert comparison.regressions(0.0) == []


def test_what_became_wrong_is_named_with_its_reason_and_is_a_regression(tmp_path):
    after = [verdict("a.x"), verdict("a.x", "crashed", number=1, reason="died")]
    comparison = held(tmp_path, [verdict("a.x"), verdict("a.x", number=1)], after)
    (found,) = comparison.differences
    assert (found.unit, found.kind) == ("a.x", ChangeKind.WRONG)
    assert (found.before, found.after, found.failing) == ("right", "1 of 2 not right", 1)
    assert found.reasons == (("crashed", "died", "((T([1], f32),), {})"),)
    assert comparison.regressions(None) == [found]


def test_one_that_was_wrong_and_fails_in_more_cases_became_wrong(tmp_path):
    before = [verdict("a.x", "wrong"), verdict("a.x", number=1)]
    after = [verdict("a.x", "wrong"), verdict("a.x", "wrong", number=1)]
    comparison = held(tmp_path, before, after)
    assert named(comparison) == {"a.x": ChangeKind.WRONG}
    assert comparison.differences[0].failing == 1


def test_one_that_was_wrong_and_still_is_says_nothing_new(tmp_path):
    before = [verdict("a.x", "wrong"), verdict("a.x", "wrong", number=1)]
    after = [verdict("a.x", "crashed"), verdict("a.x", number=1)]
    assert named(held(tmp_path, before, after)) == {}


def test_what_became_right_is_no_regression(tmp_path):
    comparison = held(tmp_path, [verdict("a.x", "wrong")], [verdict("a.x")])
    assert named(comparison) == {"a.x": ChangeKind.RIGHT}
    assert comparison.regressions(0.05) == []


def test_kernels_appear_and_disappear(tmp_path):
    before, after = [verdict("a.x"), verdict("w.x", "wrong")], [verdict("b.x")]
    one, other = {"missing": ["b.x"]}, {"missing": ["a.x", "w.x"]}
    comparison = held(tmp_path, before, after, one=one, other=other)
    assert named(comparison) == {
        "a.x": ChangeKind.DISAPPEARED,
        "w.x": ChangeKind.DISAPPEARED,
        "b.x": ChangeKind.APPEARED,
    }
    assert [d.unit for d in comparison.regressions(None)] == ["a.x"]  # the other one was wrong anyway


def test_an_overload_that_is_declined_now_has_disappeared(tmp_path):
    options = {"optional": ["a.x"]}
    comparison = held(tmp_path, [verdict("a.x")], [verdict("a.x", "unsupported")], one=options, other=options)
    assert named(comparison) == {"a.x": ChangeKind.DISAPPEARED}
    assert comparison.differences[0].after == "declined"


def test_an_edited_kernel_that_is_slower_is_named_with_intervals(tmp_path):
    before = [*steady(), timed("a.x", 1.0)]
    comparison = held(tmp_path, before, [*steady(), timed("a.x", 0.7)], edited=("a.x",))
    (found,) = comparison.differences
    assert (found.unit, found.kind, found.same_source) == ("a.x", ChangeKind.SLOWER, False)
    assert found.speeds.change.value == pytest.approx(0.7)
    assert found.speeds.change.low < 0.7 < found.speeds.change.high < 0.95
    assert comparison.regressions(None) == []  # nobody asked how much is too much
    assert comparison.regressions(0.05) == [found]
    assert comparison.regressions(0.30) == []  # the interval reaches beyond that


def test_an_edited_kernel_that_is_faster_is_named(tmp_path):
    comparison = held(tmp_path, [*steady(), timed("a.x", 1.0)], [*steady(), timed("a.x", 1.5)], edited=("a.x",))
    assert named(comparison) == {"a.x": ChangeKind.FASTER}


def test_what_the_interval_does_not_support_is_not_named(tmp_path):
    before = [*steady(), timed("a.x", 1.0, within=0.3)]
    comparison = held(tmp_path, before, [*steady(), timed("a.x", 0.8, within=0.3)], edited=("a.x",))
    assert comparison.differences == ()


def test_a_kernel_with_the_same_source_is_the_ruler_and_named_only_when_asked_for(tmp_path):
    before, after = [*steady(), timed("a.x", 1.0)], [*steady(), timed("a.x", 0.6)]
    comparison = held(tmp_path, before, after)
    assert comparison.differences == ()
    assert comparison.largest_control_change[0] == "a.x"
    asked = compare(tmp_path / "before", tmp_path / "after", report_unchanged=True)
    assert named(asked) == {"a.x": ChangeKind.SLOWER}
    assert asked.differences[0].same_source


def test_with_another_torch_nothing_is_the_same(tmp_path):
    before, after = [*steady(), timed("a.x", 1.0)], [*steady(), timed("a.x", 0.6)]
    comparison = held(tmp_path, before, after, other={"versions": {"torch": "2.14.0"}})
    assert named(comparison) == {"a.x": ChangeKind.SLOWER}
    assert comparison.noise["operators"].control_count == 0
    assert comparison.remarks == ("torch differs: 2.13.0, and 2.14.0; ATen differs, too",)


def test_noise_is_learnt_from_what_has_not_changed(tmp_path):
    noisy = [timed(op, 1.0 + 0.1 * (-1) ** n) for n, op in enumerate(RULERS)]
    comparison = held(tmp_path, [*steady(), timed("a.x", 1.0)], [*noisy, timed("a.x", 0.75)], edited=("a.x",))
    assert comparison.noise["operators"].control_count == len(RULERS)
    assert 0.1 < comparison.noise["operators"].deviation < 0.2
    assert comparison.differences == ()  # on a quiet machine it is named: see above


def test_where_aten_took_another_time_the_machine_was_another(tmp_path):
    before, after = timed("a.x", 1.0), timed("a.x", 0.7, aten_us=25.0)
    assert held(tmp_path, [*steady(), before], [*steady(), after], edited=("a.x",)).differences == ()


def test_a_change_must_be_larger_than_those_of_what_has_not_changed(tmp_path):
    after = [*steady()[1:], timed(RULERS[0], 0.5), timed("a.x", 0.6)]
    comparison = held(tmp_path, [*steady(), timed("a.x", 1.0)], after, edited=("a.x",))
    assert comparison.noise["operators"].deviation == pytest.approx(0.03, abs=1e-3)
    assert comparison.differences == ()
    assert comparison.largest_control_change[0] == RULERS[0]


def test_one_case_among_many_is_not_lost_in_the_mean(tmp_path):
    before = [*steady(), *(timed("a.x", 1.0, number=n) for n in range(30))]
    after = [*steady(), *(timed("a.x", 0.6 if n == 7 else 1.0, number=n) for n in range(30))]
    comparison = held(tmp_path, before, after, edited=("a.x",))
    (found,) = comparison.differences
    assert found.kind is ChangeKind.SLOWER
    assert found.speeds.change.high > 1  # the mean alone says nothing
    assert [c.case for c in found.speeds.slower] == ["((T([7], f32),), {})"]
    assert comparison.regressions(0.05) == [found]


@pytest.mark.parametrize(
    "late",
    [
        {"alarm": "faster than light"},  # no record
        {"timed": "device"},  # another kind of time
        {"id": "another"},
    ],
)
def test_times_that_do_not_compare_are_left_alone(tmp_path, late):
    before, after = timed("a.x", 1.0), timed("a.x", 0.2) | late
    assert held(tmp_path, [*steady(), before], [*steady(), after], edited=("a.x",)).differences == ()


def test_a_wrong_kernel_has_no_speed(tmp_path):
    bad = verdict("a.x", "wrong", number=1)
    comparison = held(
        tmp_path, [*steady(), timed("a.x", 1.0), bad], [*steady(), timed("a.x", 0.2), bad], edited=("a.x",)
    )
    assert comparison.differences == ()


def test_kernels_of_one_custom_operator_are_held_each_against_itself(tmp_path):
    rows = [verdict("mine", kernel=name, id="1") for name in ("mine_a", "mine_b")]
    kernels = [
        {"name": n, "ops": ["mine"], "digest": "", "file": None, "reference": "mine_reference"}
        for n in ("mine_a", "mine_b")
    ]
    after = [rows[0], rows[1] | {"verdict": "wrong", "reason": "all"}]
    comparison = held(tmp_path, rows, after, one={"kernels": kernels}, other={"kernels": kernels})
    assert named(comparison) == {"mine_b": ChangeKind.WRONG}
    assert comparison.unit_noun == "implementations"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite_digest": "d2", "config": {"dtypes": ["f16"]}}, ["the cases differ", "digest d1", "digest d2", "--dtypes was f32, and f16"]),
        ({"machine": {"name": "Another"}}, ["the devices differ: cpu (A CPU), and cpu (Another)"]),
        ({"config": {"device": "cuda:1"}}, ["the devices differ: cpu (A CPU), and cuda (A CPU)"]),
    ],
)  # fmt: skip
def test_incomparable_runs_are_refused_with_what_differs(tmp_path, options, words):
    with pytest.raises(IncomparableError) as error:
        held(tmp_path, [verdict("a.x")], [verdict("a.x")], other=options)
    for word in words:
        assert word in str(error.value)
    assert error.value.exit_code == 2


def test_runs_of_an_older_opforge_have_no_digest_and_are_refused(tmp_path):
    options = {"suite_digest": ""}
    with pytest.raises(IncomparableError, match="the cases differ"):
        held(tmp_path, [verdict("a.x")], [verdict("a.x")], one=options, other=options)


def test_an_unfinished_run_is_refused(tmp_path):
    one, other = (write(tmp_path / n, [verdict("a.x")], unfinished=n == "b") for n in "ab")
    with pytest.raises(RunDirectoryError, match="unfinished"):
        compare(one, other)


# --- the statistics


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 7, 2.3646), (0.9995, 9, 4.7809), (0.999, 30, 3.3852)],
)
def test_students_distribution_is_that_of_the_tables(share, freedom, value):
    assert significance.student_quantile(share, freedom) == pytest.approx(value, abs=1e-4)


def test_few_unchanged_kernels_teach_nothing():
    assert significance.estimate_noise(
        [Ratio(2.0, 1.9, 2.1)] * (significance.MIN_CONTROLS - 1), 0.02
    ) == significance.Noise(0.02)


def test_noise_is_found_in_spite_of_a_few_that_did_change():
    chance = np.random.default_rng(3)
    ratios = [Ratio(v, v * 0.99, v * 1.01) for v in np.exp(0.08 * chance.standard_normal(400))]
    ratios[:20] = [Ratio(5.0, 4.9, 5.1)] * 20
    assert significance.estimate_noise(ratios, 0.02).deviation == pytest.approx(0.08, rel=0.2)


@pytest.mark.parametrize("controls", [8, 40])
@pytest.mark.parametrize("edited", [1, 10])
def test_false_alarms_are_as_rare_as_is_said(controls, edited):
    """Normal noise between runs, of a size that nobody tells: how often is anything named that has not changed?"""
    chance = np.random.default_rng(controls + edited)
    alarms, times = 0, 1500
    for _ in range(times):
        noise, within = chance.uniform(0.02, 0.15), chance.uniform(0.005, 0.1)
        logs = math.hypot(noise, within) * chance.standard_normal(controls + edited)
        ratios = [Ratio(math.exp(v), math.exp(v - 1.96 * within), math.exp(v + 1.96 * within)) for v in logs]
        learnt = significance.estimate_noise(ratios[:controls], 0.02)
        wide = [significance.widen(r, learnt, edited) for r in ratios[controls:]]
        alarms += any(w.low > 1 or w.high < 1 for w in wide)
    assert alarms / times < 0.025


# --- the command


@pytest.fixture
def regressed(tmp_path) -> tuple[str, str]:
    nasty = "<b>|`x`\x1b[31m\x00]]>\n::error::"
    before = [*steady(), timed("a.x", 1.0), verdict("w.x")]
    after = [*steady(), timed("a.x", 0.7), verdict("w.x", "wrong", reason=nasty)]
    write(tmp_path / "a", before)
    write(tmp_path / "b", after, digests={"a.x": "edited"})
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_the_command_names_what_is_worse_and_exits_with_1(regressed, capsys):
    assert call(["compare", *regressed, "--fail-on-regression", "5%"]) == 1
    said = capsys.readouterr().out
    assert "slower" in said
    assert "regression (wrong, missing or significantly more than 5 % slower): w.x, a.x" in said
    assert "\x1b[31m" not in said


def test_only_slower_is_a_regression_when_asked_for(tmp_path, capsys):
    one = write(tmp_path / "a", [*steady(), timed("a.x", 1.0)])
    other = write(tmp_path / "b", [*steady(), timed("a.x", 0.7)], digests={"a.x": "edited"})
    assert call(["compare", str(one), str(other)]) == 0
    assert call(["compare", str(one), str(other), "--fail-on-regression", "5%"]) == 1
    assert call(["compare", str(one), str(other), "--fail-on-regression", "40 %"]) == 0
    assert call(["compare", str(other), str(one), "--fail-on-regression", "0%"]) == 0
    assert "faster" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["5", "-5%", "100%", "x%", ""])
def test_a_share_that_is_none_is_refused(regressed, text, capsys):
    assert call(["compare", *regressed, "--fail-on-regression", text]) == 2
    assert "for example 5%" in capsys.readouterr().err


def test_json_holds_everything(regressed, capsys):
    assert call(["compare", *regressed, "--format", "json", "--fail-on-regression", "5%"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["regressions"] == ["w.x", "a.x"]
    by_op = {d["op"]: d for d in found["differences"]}
    assert by_op["a.x"]["speed"]["change"]["value"] == pytest.approx(0.7)
    assert by_op["w.x"]["reasons"][0]["verdict"] == "wrong"


def test_markdown_shows_untrusted_words_as_code(regressed, capsys):
    assert call(["compare", *regressed, "--format", "markdown"]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "wrong: " in line]
    assert line.startswith("- `w.x`: ``wrong: <b>\\|`x`\\x1b[31m\\x00]]> ::error::  in  ")
    assert line.endswith("``")


def test_junit_fails_where_there_is_a_regression(regressed, capsys):
    assert call(["compare", *regressed, "--format", "junit", "--fail-on-regression", "5%"]) == 1
    suite = ET.fromstring(capsys.readouterr().out).find("testsuite")
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert failed == {"no regression", "w.x became wrong", "a.x slower"}
    assert (suite.get("tests"), suite.get("failures")) == ("3", "3")


def test_bad_words_are_usage_errors(regressed, tmp_path, capsys):
    assert call(["compare", *regressed, "--format", "xml"]) == 2
    assert call(["compare", str(tmp_path / "nowhere"), regressed[0]]) == 2
    assert "holds no run" in capsys.readouterr().err
