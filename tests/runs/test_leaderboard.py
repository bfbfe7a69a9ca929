"""Boards of runs: who is compared with whom, ranks, and what is left out with its reason."""

from __future__ import annotations

import json

import pytest

from opforge.cli.main import call
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.runs.leaderboard import leaderboard
from tests.runs.written import timed, verdict, write


@pytest.fixture
def many(tmp_path):
    """Return a folder of runs: three on the same cases, one on others, one on another device, one unfinished, one old."""
    runs = tmp_path / "runs"
    write(runs / "good", [timed("a.x", 2.0), timed("b.x", 1.0)], config={"backend": "good"})
    write(runs / "fair", [timed("a.x", 1.5), verdict("b.x", "wrong")], config={"backend": "fair"})
    write(runs / "alike", [timed("a.x", 1.99), timed("b.x", 1.01)], config={"backend": "alike"})
    write(runs / "other_cases", [timed("a.x", 9.0)], suite_digest="d2")
    write(runs / "other_device", [timed("a.x", 9.0)], machine={"name": "Another"})
    write(runs / "broken_off", [timed("a.x", 9.0)], unfinished=True)
    write(runs / "old", [timed("a.x", 9.0)], suite_digest="")
    (runs / "no run at all").mkdir()
    return runs


def test_only_runs_on_the_same_cases_and_device_share_a_board(many):
    found = leaderboard([many])
    first, *others = [sorted(e.name for e in b.entries) for b in found.boards]
    assert first == ["alike", "fair", "good"]
    assert sorted(others) == [["other_cases"], ["other_device"]]
    reasons = {path.rpartition("/")[2]: reason for path, reason in found.excluded}
    assert sorted(reasons) == ["broken_off", "old"]
    assert "unfinished" in reasons["broken_off"]
    assert "older opforge" in reasons["old"]


def test_ranks_say_only_what_the_intervals_support(many):
    board = leaderboard([many], "common").boards[0]
    assert [(e.name, r) for e, r in zip(board.entries, board.ranks, strict=True)] == [
        ("good", 1),
        ("alike", 1),  # within the interval
        ("fair", 3),
    ]


def test_runs_are_ranked_by_correctness_first(many):
    board = leaderboard([many]).boards[0]
    ranks = {e.name: r for e, r in zip(board.entries, board.ranks, strict=True)}
    assert ranks == {"good": 1, "alike": 1, "fair": 3}
    assert board.operators == ("a.x", "b.x")


def test_the_common_mean_is_over_what_every_run_has(many):
    board = leaderboard([many]).boards[0]
    assert board.common == 1
    values = {e.name: e.common.value for e in board.entries}
    assert values["good"] == pytest.approx(2.0)
    assert values["fair"] == pytest.approx(1.5)


def test_a_run_without_times_comes_after_those_with(tmp_path):
    one = write(tmp_path / "untimed", [verdict("a.x"), timed("b.x", 1.0) | {"speedup": None}])
    other = write(tmp_path / "timed", [verdict("a.x"), timed("b.x", 0.5)])
    board = leaderboard([one, other], "performance").boards[0]
    assert [(e.name, r) for e, r in zip(board.entries, board.ranks, strict=True)] == [("timed", 1), ("untimed", 2)]


def test_what_differs_within_a_board_is_said(tmp_path):
    one = write(tmp_path / "a", [timed("a.x", 1.0)])
    other = write(tmp_path / "b", [timed("a.x", 1.0)], versions={"torch": "2.14.0"}, config={"p": 1.2})
    board = leaderboard([one, other, one]).boards[0]
    assert len(board.entries) == 2  # a run that is named twice is one
    assert board.setting_differences == "torch differs: 2.13.0, 2.14.0; the p of perf@p differs: 1, 1.2"


def test_bad_words_are_answered(tmp_path, many):
    with pytest.raises(OpforgeError, match="cannot rank by 'beauty'; allowed: correctness"):
        leaderboard([many], "beauty")
    with pytest.raises(RunDirectoryError, match="holds no run"):
        leaderboard([many / "no run at all"])
    with pytest.raises(RunDirectoryError, match="is not a folder"):
        leaderboard([tmp_path / "nowhere"])
    assert call(["leaderboard", str(many), "--format", "junit"]) == 2


def test_the_command_shows_boards_operators_and_what_is_left_out(many, capsys):
    assert call(["leaderboard", str(many)]) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert (
        "1 good good 1.0000 (2 of 2 right) 1.0000 1.414 [1.404, 1.424] (n=2) 2.000 [1.980, 2.020] 1.00 [0.50, 1.00]"
        in lines
    )
    assert "b.x 1.010 [1.000, 1.020] 1.000 [0.990, 1.010] 0/1 passed" in lines
    assert any(line.startswith("Runs on other cases or devices") for line in lines)
    assert any(line.startswith("left out: ") and "unfinished" in line for line in lines)


def test_markdown_and_json_say_the_same(many, capsys):
    assert call(["leaderboard", str(many), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert "| 3 | `fair` | `fair` | 0.5000 (1 of 2 right) |" in said
    assert call(["leaderboard", str(many), "--format", "json", "--by", "perf_at_p"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["order"] == "perf_at_p"
    board = found["boards"][0]
    assert [run["name"] for run in board["runs"]][-1] == "fair"
    assert {op["op"]: op["passed"] for op in board["runs"][-1]["operators"]} == {"a.x": 1, "b.x": 0}


def test_a_folder_of_unfinished_runs_has_no_board(tmp_path):
    write(tmp_path / "a", [verdict("a.x")], unfinished=True)
    assert call(["leaderboard", str(tmp_path)]) == 5
