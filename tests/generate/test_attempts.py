"""Models write kernels and are told what the judge says: real SDKs against loopback servers, the real sandbox."""

from __future__ import annotations

import json
from itertools import repeat

import pytest

from opforge.cases import Case
from opforge.generate.agent import NoAnswerError
from opforge.kernels.proof import proof_path
from opforge.runs import RunConfig, run
from opforge.suites.given import GivenSuite
from tests.conftest import verdicts
from tests.generate.making import CASES, CHEAT, HANG, RELU, TRITON, WRONG, fenced, making
from tests.generate.servers import AnthropicServer, Cut, OpenAIServer, Say, Status

__all__ = ["making"]
SHELL = "pip install torch\n"
RIGHT = {"relu.default": {("passed", "")}}


def test_a_right_kernel_lands_in_a_directory_with_its_proof_and_is_judged_again_without_the_model(making, tmp_path):
    with AnthropicServer([Say(fenced(TRITON))]) as server:
        ended = making.run(server, dsl="triton", timeout_s=30.0)
    assert verdicts(ended) == RIGHT
    assert ended.summary.exit_code == 0
    (asked,) = server.requests
    assert "relu(Tensor self) -> Tensor" in asked.text
    assert "T([4, 3], f32, stride=(1, 4))" in asked.text
    assert "relu_kernel_impl(self)" in asked.text
    assert "triton.language" in json.dumps(asked.body["system"])

    file = making.out / "generated_kernels" / "relu" / "relu_implementation_1.py"
    assert file.read_text() == TRITON
    assert json.loads(proof_path(file).read_text())["operators"]["relu.default"]
    config = RunConfig("given", "directory", ops_directory=str(making.out / "generated_kernels"), timeout_s=30.0)
    suite = GivenSuite([Case.make("relu.default", text) for text in CASES])
    assert verdicts(run(config, tmp_path / "again", suite=suite)) == RIGHT


def test_a_wrong_kernel_is_mended_after_feedback_and_everything_is_on_disk(making):
    with AnthropicServer([Say(fenced(WRONG)), Say(fenced(RELU))]) as server:
        assert verdicts(making.run(server)) == RIGHT
    second = server.requests[1]
    assert [m["role"] for m in second.body["messages"]] == ["user", "assistant", "user"]
    assert "The kernel is not right: 0 of 2 cases passed" in second.text
    assert "T([3, 4], f32)" in second.text
    assert "ATen has" in second.text
    assert "2 attempts left" in second.text

    assert making.text("relu/worker_1/round_1/kernel.py") == WRONG
    assert making.text("relu/worker_1/round_2/reply.md") == fenced(RELU)
    assert "2 attempts left" in making.text("relu/worker_1/round_2/prompt.md")
    first = json.loads(making.text("relu/worker_1/round_1/verdict.json"))
    assert (first["right"], first["scores"]["verdicts"]) == (False, {"wrong": 2})
    assert json.loads(making.text("relu/worker_1/round_2/cost.json"))["input_tokens"] == 100
    assert len(making.text("requests.jsonl").splitlines()) == 2
    summary = json.loads(making.text("summary.json"))
    assert (summary["right"], summary["attempts"], summary["requests"]) == (1, 2, 2)


@pytest.mark.slow
def test_prose_then_a_bare_kernel_then_two_fences(making):
    replies = ["I would use a mask.", WRONG, f"{fenced(SHELL, 'sh')}\n{fenced(RELU)}"]
    with OpenAIServer([Say(text) for text in replies]) as server:
        assert verdicts(making.run(server, model="gpt-5")) == RIGHT
    assert "no code block" in server.requests[1].text
    assert "0 of 2 cases passed" in server.requests[2].text


def test_a_cheat_is_named_and_does_not_land_among_the_right_kernels(making):
    with AnthropicServer(repeat(Say(fenced(CHEAT)))) as server:
        ended = making.run(server, rounds=2)
    assert {verdict for verdict, _ in verdicts(ended)["relu.default"]} == {"cheated"}
    assert "`cheated`" in server.requests[1].text
    assert ended.summary.exit_code == 1
    assert not (making.out / "generated_kernels").exists()
    assert (making.out / "rejected_kernels" / "relu" / "relu_implementation_1.py").read_text() == CHEAT
    assert "none of 2 attempts is right" in " ".join(ended.manifest.plan.remarks)


@pytest.mark.slow
def test_an_honest_attempt_that_is_nearly_right_is_kept_before_a_cheat(making):
    with AnthropicServer([Say(fenced(CHEAT)), Say(fenced(WRONG)), Say(fenced(CHEAT))]) as server:
        making.run(server)
    assert (making.out / "rejected_kernels" / "relu" / "relu_implementation_1.py").read_text() == WRONG
    assert "0% right" in json.loads(making.text("relu/winner.json"))["words"]


@pytest.mark.slow
def test_a_hang_is_a_verdict_and_the_next_attempt_goes_on(making):
    with AnthropicServer([Say(fenced(HANG)), Say(fenced(RELU))]) as server:
        assert verdicts(making.run(server)) == RIGHT
    assert "timed_out" in server.requests[1].text


@pytest.mark.slow
def test_a_full_server_and_a_cut_connection_are_tried_again(making):
    with AnthropicServer([Status(429, retry_after="0"), Cut(fenced(WRONG)), Say(fenced(RELU))]) as server:
        assert verdicts(making.run(server)) == RIGHT
    assert len(server.requests) == 3
    assert len(making.text("requests.jsonl").splitlines()) == 1


def test_a_server_that_fails_for_good_breaks_the_run_off_with_the_reason(making):
    with (
        AnthropicServer(repeat(Status(500, retry_after="0"))) as server,
        pytest.raises(NoAnswerError, match=r"no request was answered, and 1 failed; the last one: .*500.*--resume"),
    ):
        making.run(server)
    with AnthropicServer([Say(fenced(RELU))]) as server:
        assert verdicts(making.run(server, resume=True)) == RIGHT


@pytest.mark.slow
def test_a_server_that_never_answers_breaks_the_run_off_and_it_can_be_resumed(making):
    ops = ("relu.default", "abs.default", "neg.default")
    with AnthropicServer(repeat(Status(401))) as server, pytest.raises(NoAnswerError, match="no request was answered"):
        making.run(server, ops=ops, parallel=1)
    sources = {name: RELU.replace("relu", name) for name in ("abs", "neg", "relu")}
    with AnthropicServer(lambda seen: Say(fenced(_named(sources, seen.text)))) as server:
        ended = making.run(server, ops=ops, rounds=1, resume=True)
    assert {op for op, found in verdicts(ended).items() if found == {("passed", "")}} == {"relu.default"}
    assert len(server.requests) == 3


def _named(sources, text):
    return next(source for name, source in sources.items() if f"{name}_kernel_impl" in text)


@pytest.mark.slow
def test_the_budget_ends_the_run_cleanly(making):
    with AnthropicServer(repeat(Say(fenced(WRONG), input_tokens=3000, output_tokens=1000))) as server:
        ended = making.run(server, rounds=50, max_tokens=20_000, reply_tokens=1024)
    assert 1 < len(server.requests) <= 5
    summary = json.loads(making.text("summary.json"))
    assert "budget is spent" in summary["stopped"]
    assert summary["input_tokens"] + summary["output_tokens"] <= 20_000
    assert {verdict for verdict, _ in verdicts(ended)["relu.default"]} == {"wrong"}


@pytest.mark.slow
def test_a_right_kernel_is_timed_and_the_model_told_how_fast_it_is(making):
    with AnthropicServer([Say(fenced(RELU)), Say(fenced(WRONG))]) as server:
        ended = making.run(server, timed=True, rounds=2, timeout_s=30.0)
    assert "The kernel is right: 3 cases passed" in server.requests[1].text
    assert "Make it faster" in server.requests[1].text
    assert "× [" in server.requests[1].text
    assert verdicts(ended) == RIGHT
    assert (making.out / "generated_kernels" / "relu" / "relu_implementation_1.py").read_text() == RELU


@pytest.mark.slow
def test_workers_try_side_by_side_and_all_stop_when_one_is_right(making):
    def answer(seen):
        all_here = len({request.body.get("temperature") for request in server.requests}) == 3
        return Say(fenced(RELU if all_here and "worker 2 of 3" in seen.body["messages"][1]["content"] else WRONG))

    with OpenAIServer(answer) as server:
        ended = making.run(server, model="gpt-5", workers=3, rounds=15)
    assert verdicts(ended) == RIGHT
    assert len(server.requests) < 3 * 15
    temperatures = {seen.body.get("temperature") for seen in server.requests}
    assert len(temperatures) == 3
    assert "worker 2" in json.loads(making.text("relu/winner.json"))["words"]


def test_prompts_of_ones_own_come_first_and_the_others_stay(making, tmp_path):
    (tmp_path / "first.md.j2").write_text("Mine for {{ task.name }} as {{ entry }}.")
    with AnthropicServer([Say(fenced(RELU))]) as server:
        making.run(server, prompts=str(tmp_path))
    assert server.requests[0].text.strip() == "Mine for relu as relu_kernel_impl."
    assert "You write kernels" in json.dumps(server.requests[0].body["system"])
