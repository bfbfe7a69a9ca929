"""Many runs recorded at once: failures cost only themselves, what was broken off is gone on with, and all becomes one trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opforge.procs.child import send
from opforge.traces import trace_file
from opforge.traces.collect import Collector
from opforge.traces.parallel import Limits, Recording
from opforge.traces.recordings import Parts, RunEnd, TracedRun
from opforge.traces.targets import FUNCTION, Settings, Target
from opforge.traces.trace_file import CallCount, Trace, TracedCall
from tests.conftest import ROOT


def run_of(function: str, way: str = "inference", **settings) -> TracedRun:
    return TracedRun(Target(FUNCTION, f"tests.traces.programs:{function}"), way, Settings(**settings))


# Forks are made by a process without threads, which this one may not be.
RECORD = """
import json, sys, time
from pathlib import Path
from opforge.traces.parallel import Limits, Recording, forks_reach, preload
from opforge.traces.recordings import Parts
from tests.traces.test_parallel import run_of

parts, ended = Parts(Path(sys.argv[1])), []
say = lambda run, how: ended.append([run.target.name.partition(":")[2], how.error])
runs = [run_of(name) for name in ("indexed", "raises", "dies", "without_memory_once", "leaves")]
preload(["function"])
reaches = forks_reach("cpu")
Recording(parts, Limits(workers=2, until=time.monotonic() - 1), say).record(runs)
late = [*ended]
Recording(parts, Limits(workers=2), say).record(runs)
first = sorted(ended)
ended.clear()
Recording(parts, Limits(workers=2), say).record(runs)
again = sorted(name for name, _ in ended)
ended.clear()
Recording(parts, Limits(run_s=1), say).record([run_of("hangs")])
print(json.dumps({"reaches": reaches, "late": late, "first": first, "again": again, "hung": ended}))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[dict[str, list], Parts]:
    folder = tmp_path_factory.mktemp("many")
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPFORGE_TEST_FOLDER": str(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", RECORD, str(folder / "parts")],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), Parts(folder / "parts")


def test_a_run_that_fails_costs_only_itself(recorded):
    said, parts = recorded
    errors = dict(said["first"])
    assert said["reaches"]
    assert len(errors) == len(said["first"]) == 5
    assert errors["indexed"] == ""
    assert "raised ValueError: the model is broken" in errors["raises"]
    assert "died of SIGSEGV" in errors["dies"]
    assert "exited with status 3" in errors["leaves"]
    made = parts.merge([run_of("indexed"), run_of("dies"), run_of("never")], {"device": "cpu"})
    assert set(made.metadata["failed"]) == {
        "function:tests.traces.programs:dies inference",
        "function:tests.traces.programs:never inference",
    }
    assert made.metadata["failed"]["function:tests.traces.programs:never inference"] == "not run"
    by_model = {seen.model for call in made.calls if call.op == "add.Tensor" for seen in call.seen}
    assert "tests.traces.programs:dies" in by_model  # what it did until then is there


def test_a_run_without_memory_beside_others_is_run_again_alone(recorded):
    said, parts = recorded
    assert ["without_memory_once", ""] in said["first"]
    made = parts.merge([run_of("without_memory_once")], {})
    assert {c.op: c.count for c in made.calls if c.op != "ones.default"} == {"tanh.default": 1, "exp.default": 1}


def test_only_what_has_not_ended_well_is_run_again(recorded):
    said, _ = recorded
    assert said["late"] == []  # there was no time for any
    assert said["again"] == ["dies", "leaves", "raises"]


def test_a_run_that_takes_too_long_is_ended(recorded):
    said, parts = recorded
    assert said["hung"] == [["hangs", "took more than 1 s"]]
    ended = parts.read_end(run_of("hangs"))
    assert ended is not None
    assert ended.error == "took more than 1 s"


@pytest.mark.slow
def test_fresh_processes_record_the_same(tmp_path):
    parts, ended = Parts(tmp_path), []
    run = run_of("asks", fake=True)
    Recording(parts, Limits(), lambda run, how: ended.append((run, how.error)), fork=False).record([run])
    assert ended == [(run, "")]
    made = parts.merge([run], {})
    assert {"sum.default", "exp.default"} <= {c.op for c in made.calls}
    assert [count for what, count in made.losses.items() if "0 was used" in what] == [1]
    assert parts.output_file(run).read_text().strip() == "False"


def test_a_run_with_other_settings_is_another_run(tmp_path):
    parts, run = Parts(tmp_path), run_of("indexed")
    parts.write_end(run, RunEnd(1.0))
    assert parts.read_end(run) == RunEnd(1.0)
    assert parts.read_end(replace(run, settings=Settings(batch=2))) is None
    parts.delete(run)
    assert parts.read_end(run) is None


def test_a_message_that_was_broken_off_ends_a_part(tmp_path):
    parts, run = Parts(tmp_path), run_of("indexed")
    row = {"new": 0, "op": "relu.default", "args": "((T([3], f32),), {})", "signature": "relu", "sizes": []}
    with parts.messages_file(run).open("wb") as stream:
        send(stream, {**row, "input_bytes": 12, "result_bytes": 12, "flops": 0})
        send(stream, {"counts": [[0, "forward", 7]], "losses": {}})
        send(stream, {"counts": [[0, "forward", 1]], "losses": {}}, b"more")
    parts.write_end(run, RunEnd(1.0))
    whole = parts.messages_file(run).read_bytes()
    for missing, count in ((0, 8), (1, 7), (30, 7)):
        parts.messages_file(run).write_bytes(whole[: len(whole) - missing])
        assert [c.count for c in parts.merge([run], {}).calls] == [count]


def test_the_page_says_what_is_in_a_trace(tmp_path):
    from opforge.reports.trace_page import markdown

    calls = [
        TracedCall("relu.default", "((T([3], f32),), {})", 1234, seen=(CallCount("A", "forward", 1200), CallCount("B", "backward", 34))),
        TracedCall("relu.default", "((T([4], f32),), {})", 1, seen=(CallCount("A", "forward", 1),)),
        *(TracedCall("mm.default", f"((T([{n}, 2], f32), T([2, 2], f32)), {{}})", 1, seen=(CallCount(m, "forward", 1),)) for n, m in enumerate("ABCD")),
    ]  # fmt: skip
    about = {"models": list("ABCD"), "device": "cuda", "torch": "9.9", "recorded": "2030-01-02T03:04:05", "failed": {"hf:E training": "a | b"}}  # fmt: skip
    path = tmp_path / "made.parquet"
    trace_file.write_trace(path, Trace(calls, about, {"x: not kept": 5}))
    lines = markdown(trace_file.read_trace(path), path).splitlines()
    assert lines[0] == "# The suite `torchbench`"
    for line in (
        "| architectures | 4 |",
        "| operators | 2 |",
        "| distinct calls | 6 |",
        "| calls | 1239: 1205 forward, 34 backward |",
        "| recorded | 2030-01-02, torch 9.9, cuda |",
        "| `A` | 2 | 3 | 2 | 1,202 | 0 | 0 |",
        "| `B` | 2 | 2 | 1 | 1 | 34 | 0 |",
        "| `relu.default` | 2 | 1,235 | A, B |",
        "| `mm.default` | 4 | 4 | A, B, C and 1 more |",
        "| `hf:E training` | a \\| b |",
        "| x: not kept | 5 |",
    ):
        assert line in lines


def test_the_suite_of_popular_architectures_is_listed_when_its_data_is_here(tmp_path, monkeypatch):
    from opforge import registry
    from opforge.suites import SuiteOptions, torchbench
    from opforge.suites.case_selection import CaseSelection

    assert ("torchbench" in registry.names("suites")) == torchbench.DATA.is_file()
    collector = Collector()
    collector.start_model("model")
    for number, size in enumerate((3, 50_000_000)):
        row = {"new": number, "op": "relu.default", "args": f"((T([{size}], f32),), {{}})", "signature": str(size)}
        collector.add_message({**row, "sizes": [], "input_bytes": 4 * size, "result_bytes": 4 * size, "flops": 0}, b"")
        collector.add_message({"counts": [[number, "forward", 2]], "losses": {}}, b"")
    made = tmp_path / "any.parquet"
    trace_file.write_trace(made, collector.merged_trace({"device": "cuda"}))
    monkeypatch.setattr(torchbench, "DATA", Path(made))
    suite = torchbench.TorchbenchSuite()
    assert (suite.name, suite.weighted) == ("torchbench", True)
    small = suite.load(SuiteOptions("cpu", selection=CaseSelection(topn=1)))
    assert {op: [c.args for c in cases] for op, cases in small.cases.items()} == {
        "relu.default": ["((T([3], f32),), {})"] * 2
    }
    assert [loss for loss in small.losses if "profile small" in loss]
    full = suite.load(SuiteOptions("cpu", selection=CaseSelection(topn=1, profile="full")))
    assert [c.args for c in full.cases["relu.default"]] == ["((T([50000000], f32),), {})"] * 2
