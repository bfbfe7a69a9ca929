"""A suite is tested before it tests: mutants that it lets through are named, and a better case kills them."""

from __future__ import annotations

import json

import pytest

from opforge import registry
from opforge.errors import NothingToJudgeError
from opforge.reports.run_files import write_reports
from opforge.reports.terminal import console_for_results, print_run
from opforge.runs import RunConfig
from opforge.runs.rows import ResultRow
from opforge.runs.strength import MutantResult, Strength, measure_strength
from opforge.suites import strength as kept
from tests.conftest import TinySuite

POSITIVE = "((T([4], f32, low=1.0, high=2.0),), {})"
LARGE = "((T([700, 1000], f64, low=1.0, high=2.0),), {})"
BETTER = [POSITIVE, "((T([3, 4], f32),), {})", "((T([4, 3], f32, stride=(1, 4), offset=2),), {})"]


@pytest.fixture
def measure_tiny(monkeypatch):
    """Return a function that runs the mutants of some operators against given cases."""
    monkeypatch.setitem(registry.BUILTIN["suites"], "tiny", "tests.conftest:TinySuite")
    registry._entries.cache_clear()

    def run(cases: dict[str, list[str]], **fields: object) -> Strength:
        monkeypatch.setattr(TinySuite, "cases", cases)
        monkeypatch.setattr(TinySuite, "performance", fields.pop("performance", False))
        return measure_strength(RunConfig("tiny", "aten", timeout_s=20.0, **fields))

    yield run
    registry._entries.cache_clear()


@pytest.mark.slow
def test_a_weak_suite_shows_its_survivors_and_a_better_one_kills_them(measure_tiny):
    """A case that is too large to be run in hostile forms is all that the weak suite has."""
    weak = measure_tiny({"relu.default": [LARGE]})
    assert set(weak.weak["relu.default"]) == {
        "identity", "strides_ignored", "offset_ignored", "nan_swallowed", "inf_swallowed",
    }  # fmt: skip
    assert not any(t.passed_wrong for t in weak.survivors)
    assert weak.kill_rate == pytest.approx(0.5, abs=0.05)

    better = measure_tiny({"relu.default": [LARGE, POSITIVE], "add.Tensor": ["((T([3], f32), T([3], f32)), {})"]})
    assert better.weak == {}
    assert better.kill_rate == 1


@pytest.mark.slow
def test_in_place_and_out_forms_fall_by_their_numbers(measure_tiny):
    strength = measure_tiny({
        "relu_.default": BETTER[1:],
        "abs.out": ["((T([3, 4], f32),), {'out': T([3, 4], f32)})"],
        "add_.Tensor": ["((T([3], f32), T([3], f32)), {'alpha': 2})"],
    })  # fmt: skip
    for op in ("relu_.default", "abs.out", "add_.Tensor"):
        traces = {m: t for (o, m), t in strength.results.items() if o == op}
        assert {m: traces[m].killed_by for m in ("zeros", "edge", "low_precision")} == dict.fromkeys(
            ("zeros", "edge", "low_precision"), "wrong"
        )
        assert traces["nothing_written"].killed_by == "contract"
    assert strength.results["add_.Tensor", "ignored:alpha"].killed_by == "wrong"
    assert strength.results["add_.Tensor", "swapped"].killed_by == "wrong"  # with alpha it is not the same


@pytest.mark.slow
def test_what_is_right_is_not_counted(measure_tiny):
    strength = measure_tiny({
        "mul.Tensor": ["((T([3], f32), T([3], f32)), {})"],
        "clone.default": ["((T([3], f32),), {})"],
    })  # fmt: skip
    assert not strength.results["mul.Tensor", "swapped"].is_detectable
    assert not strength.results["clone.default", "identity"].is_detectable


def test_the_way_in_which_mutants_are_made_is_not_what_kills_them(measure_tiny, monkeypatch):
    monkeypatch.setattr("opforge.runs.strength.mutants_of", lambda _op: ["control"])
    cases = {
        "relu.default": BETTER,
        "relu_.default": BETTER,
        "abs.out": ["((T([3, 4], f32),), {'out': T([0], f32)})", "((T([3], f32),), {'out': T([3], f32, stride=(2,))})"],
        "transpose.int": ["((T([3, 4], f32), 0, 1), {})"],
        "split.Tensor": ["((T([6, 2], f32), 2), {})"],
        "topk.default": ["((T([6, 2], bf16), 1), {})"],
        "equal.default": ["((T([2], f32), T([2], f32)), {})"],
        "_foreach_add_.Scalar": ["(([T([3], f32), T([2, 2], f32)], 2), {})"],
        "bernoulli.default": ["((T([64], f32, low=0.1, high=0.9),), {})"],
        "dropout.default": ["((T([64], f32), 0.5, False), {})"],
    }
    strength = measure_tiny(cases)
    assert {op: (t.killed_by, t.reason, t.passed) for (op, _), t in strength.results.items()} == {
        op: ("", "", len(texts)) for op, texts in cases.items()
    }


@pytest.mark.slow
def test_the_first_rejection_is_enough(measure_tiny):
    strength = measure_tiny({"relu.default": [LARGE.replace("700", str(n)) for n in range(700, 704)]})
    assert strength.results["relu.default", "zeros"].passed == 0
    assert strength.results["relu.default", "identity"].passed == 4


@pytest.mark.slow
def test_timed_cases_do_not_count(measure_tiny):
    strength = measure_tiny({"relu.default": [LARGE]}, performance=True)
    assert strength.results["relu.default", "identity"].passed == 1


def test_an_operator_without_mutants_is_nothing_to_measure(measure_tiny):
    with pytest.raises(NothingToJudgeError, match="has a mutant"):
        measure_tiny({"empty_like.default": ["((T([3], f32),), {})"]})


def test_two_kinds_of_survivors():
    strength = Strength("s", "cpu", ("f32",), "2", "today")
    rows = [
        {"op": "a.x", "kernel": "zeros", "verdict": "passed", "mutant": "changed"},
        {"op": "a.x", "kernel": "edge", "verdict": "passed", "mutant": "same"},
        {"op": "a.x", "kernel": "edge", "verdict": "error", "reason": "ATen itself raises", "case": "c"},
        {"op": "a.x", "kernel": "tail", "verdict": "passed", "mutant": "void"},
        {"op": "b.x", "kernel": "zeros", "verdict": "passed", "mutant": "same"},
        {"op": "b.x", "kernel": "zeros", "verdict": "crashed", "reason": "r", "case": "c"},
    ]
    strength.add(map(ResultRow.from_wire, rows))
    assert [(t.mutant, t.passed_wrong) for t in strength.survivors] == [("edge", False), ("zeros", True)]
    assert strength.kill_rate == pytest.approx(1 / 3)
    assert strength.kills == {"crashed": 1}
    row = strength.as_json()
    assert row["equivalent"] == 1
    assert row["weak"] == {"a.x": ["edge", "zeros"]}
    assert row["by_mutant"]["zeros"] == {"killed": 1, "mutants": 2}
    assert MutantResult("a.x", "edge").survived is False


def test_a_run_names_its_weak_operators(judge_tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kept, "SHIPPED", tmp_path)
    row = {
        "torch": "2",
        "device": "cpu",
        "dtypes": ["f32"],
        "date": "today",
        "weak": {"relu.default": ["edge"], "mm.out": ["zeros"]},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(row))
    ended = judge_tiny(None, {"relu.default": [POSITIVE], "abs.default": [POSITIVE]})
    assert ended.summary.weak_judged == {"relu.default": ["edge"]}
    assert ended.summary.scores()["weak"] == ["relu.default"]
    write_reports(ended.store.path, ended.summary)
    text = (ended.store.path / "OVERALL_SUMMARY.md").read_text()
    assert "## Weak cases" in text
    assert "- `relu.default`: edge" in text
    marked = {r["op"]: r.get("weak_to") for r in json.loads((ended.store.path / "full_results.json").read_text())}
    assert marked == {"relu.default": ["edge"], "abs.default": None}
    print_run(console_for_results(), ended.manifest, ended.summary)
    assert "relu.default (edge)" in capsys.readouterr().out


def test_what_was_measured_here_goes_before_what_is_shipped(monkeypatch, tmp_path):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SHIPPED", tmp_path)
    assert kept.stored_strength("tiny", "cpu", ("f32",)) is None
    row = {"torch": "2", "device": "cpu", "dtypes": ["f32"], "date": "today", "weak": {"relu.default": ["edge"]}}
    (tmp_path / "tiny.json").write_text(json.dumps(row))
    assert kept.stored_strength("tiny", "cpu", ("f32",)).weak == {"relu.default": ["edge"]}
    path = kept.measurement_file("tiny", "cpu", ("f32",))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**row, "weak": {}}))
    assert kept.stored_strength("tiny", "cpu", ("f32",)).weak == {}
    assert kept.stored_strength("tiny", "cpu", ("bf16",)).weak == {"relu.default": ["edge"]}
