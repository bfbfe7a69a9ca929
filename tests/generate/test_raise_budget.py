"""A run that its budget has stopped goes on with a larger one, and asks nothing twice."""

from __future__ import annotations

import json
from itertools import repeat

import pytest

from opforge.errors import InternalError, OpforgeError
from opforge.generate.budget import with_raised_limits
from opforge.generate.journal import Journal
from opforge.runs import RunConfig
from tests.command import opforge
from tests.conftest import verdicts
from tests.generate.making import KEY, RELU, WRONG, Making, fenced, making
from tests.generate.servers import AnthropicServer, Say
from tests.runs import written

__all__ = ["making"]
SMALL = {"max_tokens": 10_000, "reply_tokens": 1024}
LARGE = {**SMALL, "max_tokens": 100_000}
PASSED = {"relu.default": {("passed", "")}}


def costly(source: str) -> Say:
    """Return a reply after which a small budget has nothing left."""
    return Say(fenced(source), input_tokens=9_000)


def summary(making: Making) -> dict:
    return json.loads(making.text("summary.json"))


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(making):
    with AnthropicServer([costly(WRONG), costly(RELU)]) as server:
        stopped = making.run(server, **SMALL)
        assert {verdict for verdict, _ in verdicts(stopped)["relu.default"]} == {"wrong"}
        assert len(server.requests) == 1
        again = making.run(server, resume=True, **SMALL)  # nothing new without a larger budget
        assert {verdict for verdict, _ in verdicts(again)["relu.default"]} == {"wrong"}
        assert len(server.requests) == 1
        ended = making.run(server, resume=True, **LARGE)
    assert verdicts(ended) == PASSED
    assert [len(seen.body["messages"]) for seen in server.requests] == [1, 3]
    assert "The kernel is not right" in server.requests[1].text
    assert summary(making)["stopped"] == ""
    assert (summary(making)["attempts"], summary(making)["requests"]) == (2, 2)
    assert ended.manifest.config["generation"]["max_tokens"] == 100_000
    assert ended.manifest.finished
    assert ended.summary.exit_code == 0
    assert (making.out / "generated_kernels" / "relu" / "relu_implementation_1.py").read_text() == RELU
    assert not list((making.out / "rejected_kernels").rglob("*.py"))


@pytest.mark.slow
def test_a_right_kernel_that_was_to_become_faster_lies_there_once(making):
    with AnthropicServer([costly(RELU), Say("no more ideas"), Say("none")]) as server:
        assert verdicts(making.run(server, timed=True, timeout_s=30.0, **SMALL)) == PASSED
        assert "budget is spent" in summary(making)["stopped"]
        assert verdicts(making.run(server, timed=True, timeout_s=30.0, resume=True, **LARGE)) == PASSED
    assert len(server.requests) == 3
    files = [path.name for path in (making.out / "generated_kernels" / "relu").glob("*.py")]
    assert files == ["relu_implementation_1.py"]


@pytest.mark.slow
def test_a_kernel_that_somebody_has_changed_meanwhile_stays(making):
    with AnthropicServer([costly(WRONG), costly(RELU)]) as server:
        making.run(server, **SMALL)
        file = making.out / "rejected_kernels" / "relu" / "relu_implementation_1.py"
        file.write_text("# mended by hand\n")
        making.run(server, resume=True, **LARGE)
    assert file.read_text() == "# mended by hand\n"


@pytest.mark.slow
def test_broken_off_while_it_is_taken_up_again(making, monkeypatch):
    def broken(_self):
        raise InternalError("the machine went away")

    with AnthropicServer([costly(WRONG), costly(RELU)]) as server:
        making.run(server, **SMALL)
        with monkeypatch.context() as patched, pytest.raises(InternalError):
            patched.setattr(Journal, "drop_summary", broken)
            making.run(server, resume=True, **LARGE)
        assert verdicts(making.run(server, resume=True, **LARGE)) == PASSED
    assert len(server.requests) == 2


@pytest.mark.slow
def test_a_second_bound_stops_it_again(making):
    with AnthropicServer(repeat(costly(WRONG))) as server:
        making.run(server, **SMALL)
        making.run(server, resume=True, **{**SMALL, "max_tokens": 20_000})
    assert len(server.requests) == 2
    assert "budget is spent: 18100 of 20000 tokens" in summary(making)["stopped"]


NO_LARGER = [
    ({"max_tokens": 9_050}, "--max-tokens 9050 is too small for .* more than the 9050 tokens that were spent"),
    ({"max_cost": 0.01}, r"--max-cost 0.01 is too small for .* more than the 0\.\d+ USD that were spent"),
    ({"max_cost": float("nan")}, "--max-cost nan"),
    ({"max_cost": float("inf")}, "--max-cost inf"),
]


@pytest.mark.slow
def test_a_bound_that_is_no_larger_is_answered(making):
    with AnthropicServer([costly(WRONG)]) as server:
        ended = making.run(server, **SMALL)
    for bounds, said in NO_LARGER:
        with pytest.raises(OpforgeError, match=said):
            with_raised_limits(making.out, ended.manifest.config["generation"], bounds)
    done = opforge("run", "--resume", str(making.out), "--max-tokens", "9000")
    assert done.returncode == 2
    assert "it must be more than the 9050 tokens that were spent there" in done.stderr


@pytest.mark.slow
def test_by_its_words(tmp_path):
    out = tmp_path / "run"
    with AnthropicServer([costly(WRONG), costly(RELU)]) as server:
        keys = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url}
        words = ["--suite", "opinfo", "--dtypes", "f32", "--ops", "relu", "--backend", "llm", "--dsl", "pytorch"]
        first = opforge("run", *words, "--max-tokens", "10000", "--reply-tokens", "1024", "--out", str(out), **keys)
        assert first.returncode == 1, first.stderr
        assert "the budget is spent: 9050 of 10000 tokens" in first.stderr
        assert f"opforge run --resume {out} --max-tokens N`" in first.stderr
        small = opforge("run", "--resume", str(out), "--max-tokens", "9000", **keys)
        assert small.returncode == 2
        assert "it must be more than the 9050 tokens that were spent there" in small.stderr
        done = opforge("run", "--resume", str(out), "--max-tokens", "50000", "--max-cost", "5", **keys)
        assert done.returncode == 0, done.stderr
        assert len(server.requests) == 2
        more = opforge("run", "--resume", str(out), "--max-tokens", "60000", **keys)
    assert more.returncode == 2
    assert "was not stopped by its budget; continue without" in more.stderr


def test_a_run_that_asks_no_model_has_no_budget(tmp_path):
    config = RunConfig("smoke", "aten").as_json()
    out = written.write(tmp_path / "run", [written.verdict("relu.default")], config=config)
    done = opforge("run", "--resume", str(out), "--max-cost", "5")
    assert done.returncode == 2
    assert "its backend aten calls no model" in done.stderr
