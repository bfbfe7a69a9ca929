"""Tracing programs: what is recorded, in which phase, with which contents, and what happens when they fail."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from opforge.cases.text import parse_arguments
from opforge.errors import OpforgeError
from opforge.procs.child import read_messages
from opforge.traces.collect import Collector
from opforge.traces.formats import read_calls
from opforge.traces.record import TraceResult, record, recording_metadata
from opforge.traces.targets import FUNCTION, Settings, Target, parse_changes, parse_target
from opforge.traces.trace_file import Trace
from tests.command import opforge
from tests.conftest import ROOT, slow


def traced(function: str, **settings) -> tuple[Trace, TraceResult]:
    collector = Collector()
    given = Settings(**settings)
    ended = record(
        collector, parse_target(f"tests.traces.programs:{function}"), given, lambda *_: None, max_silence_s=120
    )
    return collector.merged_trace(recording_metadata(given, ["test"])), ended


@pytest.fixture(scope="module", autouse=True)
def in_the_checkout():
    with contextlib.chdir(ROOT):
        yield


@pytest.fixture(scope="module")
def made() -> Trace:
    made, ended = traced("everything")
    assert not ended.error
    return made


def one(made: Trace, op: str):
    (call,) = (c for c in made.calls if c.op == op)
    return call


def test_phases_and_counts_of_a_training(made):
    embedding = one(made, "embedding.default")
    assert embedding.count == 3
    assert [(s.model, s.phase, s.count) for s in embedding.seen] == [("tests.traces.programs:everything", "forward", 3)]
    assert one(made, "embedding_dense_backward.default").seen[0].phase == "backward"
    assert {s.phase for c in made.calls if c.op == "addcdiv_.default" for s in c.seen} == {"optimizer"}
    assert one(made, "embedding.default").args == "((T([50, 16], f32), T([2, 6], i64, low=0, high=50)), {})"
    assert "T([12], i64, low=0, high=50)" in one(made, "nll_loss_forward.default").args


def test_without_autograd_composite_operators_are_taken_apart(made):
    ops = {call.op for call in made.calls}
    assert {"convolution.default", "addmm.default", "relu.default"} <= ops
    assert not ops & {"linear.default", "conv2d.default", "batch_norm.default", "flatten.using_ints"}


def test_contents_that_matter(made):
    assert "[T([2], i64, low=0, high=4)]" in one(made, "index.Tensor").args
    assert "T([3], i64, low=0, high=3)" in one(made, "index_select.default").args
    written = one(made, "index_put_.default")
    ((_, (place,), _), _) = parse_arguments(written.args)
    assert place.at is not None  # places that are written may not come twice: they are kept as they were
    sorted_ = parse_arguments(one(made, "bucketize.Tensor").args)[0][1]
    stored = b"".join(c.stored for c in sorted(made.calls, key=lambda c: c.stored_at))
    import numpy as np

    assert np.frombuffer(stored[place.at : place.at + 16], np.int64).tolist() == [3, 1]
    assert np.frombuffer(stored[sorted_.at : sorted_.at + 12], np.float32).tolist() == pytest.approx([0.1, 0.5, 0.9])
    (positive,), _ = parse_arguments(one(made, "rsqrt.default").args)
    assert 0.4 <= positive.low < positive.high <= 1.6


def test_calls_that_differ_in_numbers_only_do_not_grow_without_end(made):
    calls = [c for c in made.calls if c.op == "mul.Tensor" and c.args.startswith("((T([3], f32), ")]
    assert len(calls) == 4
    assert sum(c.count for c in calls) == 50


def test_a_fork_of_the_program_does_not_write_between(made):
    assert one(made, "sigmoid.default").count == 1


def test_operators_of_the_users_own(made):
    assert one(made, "opforge_test::twice.default").count == 1


@pytest.mark.parametrize(
    "function, said, code",
    [
        slow("raises", "raised ValueError: the model is broken", 1),
        slow("dies", "died of SIGSEGV", 128 + 11),
        slow("leaves", "exited with status 3", 3),
    ],
)
def test_a_program_that_fails_keeps_what_was_recorded(function, said, code):
    made, ended = traced(function)
    assert said in ended.error
    assert ended.exit_code == code
    assert one(made, "add.Tensor").count == 1


def test_a_crash_inside_a_call_names_its_operator():
    collector = Collector()
    collector.start_model("model")
    collector.add_message({"at": "mm.default"}, b"")
    assert collector.started_op == "mm.default"
    collector.add_message({"counts": [], "losses": {}}, b"")
    assert collector.started_op == ""


@pytest.mark.slow
def test_fake_tensors_get_the_ranges_that_operators_need():
    made, ended = traced("indexed", fake=True)
    assert not ended.error
    assert "low=0, high=4" in one(made, "index.Tensor").args
    assert "low=0.01, high=1.0" in one(made, "rsqrt.default").args


SCRIPT = """
import sys
import torch
assert __name__ == "__main__" and sys.argv[1:] == ["--size", "5"]
torch.relu(torch.randn(int(sys.argv[2])))
print("the script prints")
"""


def recorded_here(tmp_path: Path, target: Target, **settings) -> tuple[Collector, dict]:
    """Record in this process, as the process of a trace does; returns what was recorded, and the error."""
    from opforge.traces.child import record_target

    path = tmp_path / "calls"
    record_target(target, Settings(**settings), path.open("wb"))
    collector, said = Collector(), {}
    collector.start_model(target.model_name)
    with path.open("rb") as file:
        for row, contents in read_messages(file):
            said = row if "error" in row else said
            collector.add_message(row, contents)
    return collector, said


def program(name: str) -> Target:
    return Target(FUNCTION, f"tests.traces.programs:{name}")


@pytest.mark.slow
def test_without_contents_ranges_are_those_that_operators_need(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    collector, said = recorded_here(tmp_path, program("indexed"), fake=True)
    assert said == {}
    made = collector.merged_trace({})
    assert "low=0, high=4" in one(made, "index.Tensor").args
    assert "low=0.01, high=1.0" in one(made, "rsqrt.default").args
    assert any("bucketize.Tensor: needs the exact contents" in what for what in made.losses)


def test_a_number_that_is_not_known_is_guessed_and_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    collector, said = recorded_here(tmp_path, program("asks"), fake=True)
    assert said == {}
    made = collector.merged_trace({})
    assert [count for what, count in made.losses.items() if "0 was used" in what] == [1]
    assert capsys.readouterr().out == "False\n"


@pytest.mark.parametrize(
    "name, said",
    [
        ("raises", {"error": "the program raised ValueError: the model is broken"}),
        ("leaves", {"error": "the program exited with status 3"}),
        ("missing", {"error": "module 'tests.traces.programs' has no function 'missing'", "ours": True}),
    ],
)
def test_what_a_program_ends_with_is_sent(name, said, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    collector, found = recorded_here(tmp_path, program(name))
    assert {key: found[key] for key in said} == said
    assert ("traceback" in found) == (name == "raises")
    assert [call.op for call in collector.merged_trace({}).calls if call.op == "add.Tensor"] == ["add.Tensor"] * (
        name != "missing"
    )


@pytest.mark.slow
def test_a_script_with_arguments_on_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    ran = opforge("trace", "mine.py", "--format", "json", "--to-log", "mine.txt", "--", "--size", "5", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    row = json.loads(ran.stdout)  # what the script prints does not come between
    assert (row["distinct"], row["operators"], row["out"]) == (2, 2, "mine.parquet")
    assert "the script prints" in ran.stderr
    assert "Operator: aten.relu.default\ncnt: 1, ((T([5], f32),), {})" in (tmp_path / "mine.txt").read_text()


def test_a_failing_program_has_exit_code_1_and_its_file(tmp_path):
    (tmp_path / "bad.py").write_text("import torch\ntorch.ones(2) + 1\nraise RuntimeError('no more')\n")
    ran = opforge("trace", "bad.py", cwd=tmp_path)
    assert ran.returncode == 1
    assert "opforge: the program raised RuntimeError: no more" in ran.stderr
    assert 'bad.py", line 3' in ran.stderr
    assert "runpy" not in ran.stderr
    assert "opforge/traces" not in ran.stderr
    assert (tmp_path / "bad.parquet").is_file()


@pytest.mark.slow
def test_a_failing_program_does_not_replace_a_file(tmp_path):
    (tmp_path / "ends.py").write_text("import sys, torch\ntorch.ones(2) + 1\nsys.exit(int(sys.argv[1]))\n")
    right = opforge("trace", "ends.py", "--to-log", "ends.txt", "--", "0", cwd=tmp_path)
    assert right.returncode == 0, right.stderr
    before = {name: (tmp_path / name).read_bytes() for name in ("ends.parquet", "ends.txt")}
    failed = opforge("trace", "ends.py", "--to-log", "ends.txt", "--", "7", cwd=tmp_path)
    assert failed.returncode == 7, failed.stderr
    assert (
        "ends.parquet stays as it was, because the program failed; its calls go to ends.failed.parquet" in failed.stderr
    )
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert "aten.add.Tensor" in (tmp_path / "ends.failed.txt").read_text()
    assert read_calls(tmp_path / "ends.failed.parquet").operators == read_calls(tmp_path / "ends.parquet").operators


@pytest.mark.parametrize(
    "code, status, said",
    [(None, 0, ""), (False, 0, ""), (3, 3, ""), (-1, 255, ""), (256, 0, ""), ("no data", 1, "no data\n")],
)
def test_the_exit_code_is_pythons(code, status, said, capsys):
    from opforge.traces.child import _exit_code

    assert _exit_code(SystemExit(code)) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words, said, code",
    [
        (["nothing.here"], "cannot be traced", 2),
        (["gone.py"], "there is no script gone.py", 2),
        (["tests.traces.programs:nothing"], "no operator was called", 5),
        slow(["tests.traces.programs:missing"], "has no function 'missing'", 2),
        slow(["no_such_module:f"], "there is no module 'no_such_module'", 2),
        (["hf:X", "--set", "broken"], "is not NAME=VALUE", 2),
        (["hf:X", "--batch", "0"], "--batch 0 is out of range", 2),
        (["hf:X", "--dtype", "i64"], "is not a dtype for a model", 2),
        (["hf:X", "--device", "tpu"], "unknown device 'tpu'", 2),
        (["pyproject.toml"], "give --to-log FILE or --out", 2),
        (["pyproject.toml", "--to-log", "x.txt"], "neither a trace", 2),
    ],
)
def test_bad_input_is_answered(words, said, code):
    ran = opforge("trace", *words, cwd=ROOT)
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr


@pytest.mark.slow
def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(OpforgeError, match="pip install transformers"):
        record(Collector(), parse_target("hf:BertModel"), Settings(), lambda *_: None)


def test_help_needs_no_torch():
    import subprocess

    code = "import sys; from opforge.cli.main import call; call(['trace', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "target, settings",
    [
        ("hf:BertForMaskedLM", {"train": True, "layers": 1, "changes": {"hidden_size": 32, "num_attention_heads": 2}}),
        ("hf:LlamaForCausalLM", {"fake": True, "dtype": "bf16", "layers": 2, "seq": 4096}),
        ("hf:T5ForConditionalGeneration", {"layers": 1, "seq": 8, "changes": {"d_model": 32, "d_ff": 64}}),
    ],
)
def test_architectures_of_transformers(target, settings):
    pytest.importorskip("transformers", reason="transformers is not installed: its architectures cannot be made")
    collector = Collector()
    given = Settings(**settings)
    ended = record(collector, parse_target(target), given, lambda *_: None, max_silence_s=300)
    made = collector.merged_trace(recording_metadata(given, []))
    assert not ended.error
    assert "embedding.default" in {c.op for c in made.calls}
    assert ("optimizer" in {s.phase for c in made.calls for s in c.seen}) == given.train


def test_the_zoo_has_the_families_and_size_that_it_should():
    from opforge.traces.zoo import architectures

    zoo = architectures()
    assert len({a.target.name for a in zoo}) == len(zoo) >= 60
    assert {"encoder", "decoder", "mixture", "encoder-decoder", "state-space", "vision", "audio", "multimodal"} <= {
        a.family for a in zoo
    }
    for architecture in zoo:
        for _, settings in architecture.runs("cuda"):
            settings.checked()


def test_the_path_of_a_script_may_not_be_a_module(tmp_path: Path):
    with pytest.raises(OpforgeError, match="are for scripts"):
        parse_target("timm:resnet18", ("--x",))


def test_changes_are_python_values_or_else_words():
    assert parse_changes(["hidden_size=256", "rope.theta=1e4", "act=gelu", "sizes=[1, 2]"]) == {
        "hidden_size": 256,
        "rope.theta": 1e4,
        "act": "gelu",
        "sizes": [1, 2],
    }
