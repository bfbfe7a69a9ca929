"""Files of recorded calls as suites: choosing among their cases, and judging them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from opforge.cases import Phase
from opforge.errors import OpforgeError
from opforge.suites import SuiteOptions
from opforge.suites.case_selection import CaseSelection
from opforge.suites.lookup import find_suite
from opforge.suites.trace import TraceSuite
from opforge.traces import formats, trace_file
from opforge.traces.collect import Collector
from opforge.traces.formats import read_calls
from opforge.traces.trace_file import CallCount, Trace, TracedCall
from tests.command import opforge

MIB = 1 << 20


def call(op: str, args: str, count: int = 1, nbytes: int = 64, **more) -> TracedCall:
    seen = (CallCount("model", "forward", count),)
    return TracedCall(op, args, count, nbytes, nbytes, source="model forward", seen=seen, **more)


CALLS = [
    call("relu.default", "((T([1], f32),), {})", 5, 4),
    call("relu.default", "((T([2], f32),), {})", 5, 8),
    call("relu.default", "((T([3], f32),), {})", 1, 12),
    call("mm.default", "((T([9, 9], f32), T([9, 9], f32)), {})", 2, 324, flops=3_000_000_000),
    call("exp.default", "((T([99999999], f32),), {})", 1, 400 * MIB),
    call("cudnn_batch_norm.default", "((T([2, 2], f32), T([2], f32), None, None, None, True, 0.1, 1e-05), {})"),
    call("mine::twice.default", "((T([2], f32),), {})"),
    call("gone.default", "((T([2], f32),), {})"),
    call("new_zeros.default", "((T([2], f32, offset=100000), [3]), {'device': device('cuda:0')})"),
]


@pytest.fixture
def path(tmp_path):
    trace_file.write_trace(
        tmp_path / "mine.parquet", Trace(CALLS, {"device": "cuda", "models": ["model"]}, {"mul.Tensor: lost": 2})
    )
    return tmp_path / "mine.parquet"


def shapes(suite, op: str) -> list[str]:
    return [c.args for c in suite.cases.get(op, []) if c.phase is Phase.CORRECTNESS]


def test_a_trace_comes_back_as_it_was_written(path):
    back = read_calls(path)
    assert sorted(back.calls, key=str) == sorted(CALLS, key=str)
    assert back.metadata["models"] == ["model"]
    assert [p.name for p in path.parent.iterdir()] == ["mine.parquet"]  # no draft is left behind


def test_each_call_is_judged_and_timed_and_what_cannot_be_is_counted(path):
    suite = find_suite(str(path)).load(SuiteOptions("cpu"))
    assert {op: len(cases) for op, cases in suite.cases.items()} == {"relu.default": 6, "new_zeros.default": 2}
    assert {c.phase for c in suite.cases["relu.default"]} == set(Phase)
    assert set(suite.losses) == {
        "mul.Tensor: lost (2×)",
        "cudnn_batch_norm.default: ATen has no kernel for it on cpu (1×)",
        "mine::twice.default: not an operator of ATen, so there is nothing to compare a kernel with (1×)",
        next(loss for loss in suite.losses if loss.startswith("gone.default: no such operator in torch")),
        "exp.default: more than 32 MiB (profile small) (1×)",
        "mm.default: more than 2e+09 operations (profile small) (1×)",
    }
    assert set(suite.sources) == {str(path)}


def test_devices_and_far_offsets_become_those_of_the_run(path):
    (case, _) = find_suite(str(path)).load(SuiteOptions("cpu")).cases["new_zeros.default"]
    assert case.args == f"((T([2], f32, offset={100000 % 4096}), [3]), {{'device': device('cpu')}})"


def test_calls_that_differ_by_how_far_inside_a_storage_they_begin_are_one_case_with_the_counts_of_all(tmp_path):
    calls = [
        call("neg.default", "((T([4], f32, offset=4096),), {})", 2),
        call("neg.default", "((T([4], f32, offset=8192),), {})", 2),
        call("neg.default", "((T([4], f32, offset=1),), {})", 1),
        call("neg.default", "((T([5], f32),), {})", 3),
    ]
    trace_file.write_trace(tmp_path / "views.parquet", Trace(calls, {"device": "cpu", "models": ["model"]}, {}))
    suite = TraceSuite(tmp_path / "views.parquet")
    (cases,) = suite.load(SuiteOptions("cpu")).cases.values()
    assert len({case.id for case in cases}) == len(cases) == 6
    (heaviest, _) = suite.load(SuiteOptions("cpu", selection=CaseSelection(topn=1))).cases["neg.default"]
    assert heaviest.args == "((T([4], f32),), {})"


def test_choosing_the_heaviest_a_sample_and_what_fits(path):
    def chosen(**choice) -> dict[str, int]:
        options = SuiteOptions("cpu", selection=CaseSelection(**choice))
        return {op: len(cases) // 2 for op, cases in TraceSuite(path).load(options).cases.items()}

    heaviest = TraceSuite(path).load(SuiteOptions("cpu", selection=CaseSelection(topn=1)))
    assert shapes(heaviest, "relu.default") == ["((T([2], f32),), {})"]  # five times 16 bytes, against once 24
    assert chosen(profile="full")["mm.default"] == 1
    assert "exp.default" not in chosen(profile="full")
    assert chosen(profile="full", max_mib=1000)["exp.default"] == 1
    assert sum(chosen(sample=2).values()) == 2
    assert chosen(sample=2) == chosen(sample=2)


def test_what_fits_is_told_by_inputs_and_by_results():
    small = call("relu.default", "((T([1], f32),), {})")
    inputs, results = replace(small, input_bytes=2 * MIB), replace(small, result_bytes=2 * MIB)
    drawn, losses = CaseSelection(max_mib=1).select([small, inputs, results], "cpu")
    assert drawn == [small]
    assert losses == {"relu.default: more than 1 MiB (--max-mib 1)": 2}


def test_a_sample_prefers_what_is_heavy():
    calls = [call("relu.default", f"((T([{n}], f32),), {{}})", 1, 1000 if n % 2 else 10) for n in range(1, 401)]
    drawn, _ = CaseSelection(sample=100).select(calls, "cpu")
    assert len(drawn) == 100
    assert sum(c.input_bytes == 1000 for c in drawn) > 90


@pytest.mark.parametrize(
    "choice, said",
    [
        (CaseSelection(topn=0), "--topn 0 is out of range"),
        (CaseSelection(max_mib=-1), "--max-mib -1"),
        (CaseSelection(profile="tiny"), "unknown profile 'tiny'; allowed: small, full"),
    ],
)
def test_choices_that_are_none(choice, said):
    with pytest.raises(OpforgeError, match=said):
        choice.checked()


def test_files_that_are_no_suites(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "text.txt").write_text("hello")
    for name, said in (
        ("other.parquet", "is Parquet, but not a trace"),
        ("half.parquet", "cannot be read as a trace"),
        ("text.txt", "neither a trace"),
        ("gone.parquet", "there is no file"),
    ):
        with pytest.raises(OpforgeError, match=said):
            find_suite(str(tmp_path / name))
    with pytest.raises(OpforgeError, match="did you mean 'smoke'"):
        find_suite("smok")


def test_stored_contents_reach_the_blob_at_their_places(tmp_path, monkeypatch):
    monkeypatch.setenv("OPFORGE_CACHE", str(tmp_path / "cache"))
    collector = Collector()
    collector.start_model("model")
    for number, contents in enumerate((b"\1\0\0\0\0\0\0\0", b"\1", b"\1\0\0\0\0\0\0\0")):
        row = {
            "new": number,
            "op": "mine::op.default",
            "args": f"((T([1], i64, at={10**15}), {number}), {{}})",
            "sizes": [len(contents)],
        }
        figures = {"signature": str(number), "input_bytes": 8, "result_bytes": 8, "flops": 0}
        collector.add_message({**row, **figures}, contents)
        collector.add_message({"counts": [[number, "forward", 1]], "losses": {}}, b"")
    made = collector.merged_trace({"device": "cpu"})
    assert [c.args for c in made.calls] == [f"((T([1], i64, at={at}), {n}), {{}})" for n, at in enumerate((0, 64, 0))]
    trace_file.write_trace(tmp_path / "stored.parquet", made)
    formats.write_blob(tmp_path / "stored.parquet", tmp_path / "blob.safetensors")
    from opforge.cases.case_files import open_blob

    blob = open_blob(tmp_path / "blob.safetensors")
    assert (blob[0], blob[64], len(blob)) == (1, 1, 128)


def test_calls_of_two_models_are_one_with_both_counts():
    collector = Collector()
    for model in ("one", "two"):
        collector.start_model(model)
        row = {"new": 0, "op": "relu.default", "args": "((T([3], f32),), {})", "signature": "relu|3", "sizes": []}
        collector.add_message({**row, "input_bytes": 12, "result_bytes": 12, "flops": 0}, b"")
        collector.add_message({"counts": [[0, "forward", 2 if model == "one" else 5]], "losses": {}}, b"")
    (made,) = collector.merged_trace({}).calls
    assert made.count == 7
    assert made.source == "two forward"
    assert set(made.seen) == {CallCount("one", "forward", 2), CallCount("two", "forward", 5)}


PROGRAM = """
import torch
table = torch.randn(9, 4)
table[torch.tensor([2, 0])]
table.index_put_((torch.tensor([3, 1]),), torch.zeros(2, 4))
torch.nn.functional.layer_norm(table, (4,))
torch.empty(4, device="cpu").bernoulli_(0.5)
"""


@pytest.mark.slow
def test_what_was_traced_is_judged_right(tmp_path):
    """End to end: a program, its trace, and ATen itself judged on it; every replay is valid."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    assert opforge("trace", "mine.py", cwd=tmp_path).returncode == 0
    ran = opforge(
        "run",
        "--suite",
        "mine.parquet",
        "--backend",
        "aten",
        "--out",
        "r",
        "--format",
        "json",
        "--topn",
        "1",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    scores = json.loads(ran.stdout)["scores"]
    assert scores["correctness"] == 1.0
    assert set(scores["verdicts"]) == {"passed"}
    rows = [json.loads(line) for line in (tmp_path / "r" / "results.jsonl").read_text().splitlines()]
    assert {"index.Tensor", "index_put_.default", "native_layer_norm.default", "bernoulli_.float"} <= {
        r["op"] for r in rows
    }
    assert {r["suite"] for r in rows} == {"mine"}


def test_choosing_is_for_suites_with_weights(tmp_path):
    ran = opforge("run", "--suite", "smoke", "--topn", "3", "--out", "r", cwd=tmp_path)
    assert ran.returncode == 2
    assert "those of suite 'smoke' have none" in ran.stderr
