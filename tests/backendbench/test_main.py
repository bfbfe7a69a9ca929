"""BackendBench's command line, with its own options, on opforge."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
from BackendBench.scripts.main import main

from opforge.cases.text import LogEntry
from opforge.traces.problem_table import write_problem_table
from tests.command import in_this_process

CALLS = [
    LogEntry("aten.relu.default", 3, "((T([2, 3], f32, [1, 2]),), {})"),
    LogEntry("aten.relu.default", 2, "((T([64, 32], f32, None, 'cpu'),), {})"),
    LogEntry("aten.relu.default", 0, "((T([5], f32),), {})"),
]


def backendbench(*words, cwd):
    return in_this_process(main, *words, cwd=cwd)


@pytest.mark.slow
def test_options_without_an_equivalent_are_explained(tmp_path):
    words = ["--log-level", "ERROR", "--no-daemon", "--num-workers", "1", "--dsl", "cutedsl", "--llm-attempts", "3"]
    done = backendbench("--suite", "smoke", *words, "--disable-output-logs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "--log-level: opforge keeps no log",
        "--no-daemon: it has no effect: every kernel runs in a confined process of its own",
        "--dsl: it has no effect with --backend aten",
        "--llm-attempts: it has no effect with --backend aten",
        "--disable-output-logs: the folder of the results is removed at the end",
    ):
        assert line in done.stderr
    assert "aten on smoke" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_folder_for_results_may_be_used_again(tmp_path):
    assert backendbench("--log-dir", "logs", cwd=tmp_path).returncode == 0
    first = json.loads((tmp_path / "logs" / "full_results.json").read_text())
    shutil.copyfile(tmp_path / "logs" / "manifest.json", tmp_path / "manifest.json")
    (tmp_path / "logs" / "full_results.json").write_text("")
    done = backendbench("--log-dir", "logs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "logs is not empty; the run goes to opforge-runs/logs-" in done.stderr
    again = json.loads((tmp_path / "logs" / "full_results.json").read_text())
    assert [row["id"] for row in again] == [row["id"] for row in first]
    assert (tmp_path / "logs" / "manifest.json").read_bytes() == (tmp_path / "manifest.json").read_bytes()


def test_a_table_of_calls_is_judged_largest_first(tmp_path):
    write_problem_table(tmp_path / "problems.parquet", CALLS)
    assert set(pq.read_schema(tmp_path / "problems.parquet").names) >= {"uuid", "op_name", "args", "count"}
    words = ["--suite", "torchbench", "--alternative-torchbench-data-path", "problems.parquet", "--topn-inputs", "1"]
    done = backendbench(*words, "--check-overhead-dominated-ops", "--log-dir", "logs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--check-overhead-dominated-ops: all cases are judged" in done.stderr
    rows = json.loads((tmp_path / "logs" / "full_results.json").read_text())
    assert {row["case"].partition("f32")[0] for row in rows} == {"((T([64, 32], "}


def test_facto_becomes_opinfo(tmp_path):
    done = backendbench("--suite", "facto", "--ops", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "--suite facto: opforge judges the suite opinfo instead" in done.stderr
    assert "unknown operator 'nowhere'" in done.stderr


@pytest.mark.parametrize("option", ["--no-deamon", "--no-confin", "--allow-fallbak"])
def test_a_mistyped_option_suggests_nothing_that_weakens_a_verdict(option, tmp_path):
    done = backendbench(option, cwd=tmp_path)
    assert done.returncode == 2
    assert f"No such option: {option}" in done.stderr
    assert "--no-confine" not in done.stderr
    assert "--allow-fallback" not in done.stderr
    assert "--topn" in backendbench("--topm", "1", cwd=tmp_path).stderr
