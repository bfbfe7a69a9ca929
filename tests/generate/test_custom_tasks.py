"""Models write kernels for operators that are not in ATen: the user's reference is shown, and what is right can be judged again from disk."""

from __future__ import annotations

import json
import shutil
import signal
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from opforge.errors import InternalError, OpforgeError, RunDirectoryError
from opforge.generate.options import GenerationOptions
from opforge.runs import RunConfig, run
from opforge.runs.execute.service import JudgingService
from opforge.runs.pipeline import RunResult
from opforge.runs.reproduce import reproduce
from tests.command import opforge
from tests.conftest import verdicts
from tests.generate.making import KEY, Making, fenced, making
from tests.generate.servers import AnthropicServer, Hang, ModelServer, OpenAIServer, Say
from tests.generate.test_resume import kept, start, wait_for

__all__ = ["making"]
GEN_INPUT = """import torch
from opforge import Test

def get_correctness_tests():
    return [Test(lambda: torch.randn(5, 3), scale=2.0), Test(lambda: torch.randn(7), scale=-1.0)]

def get_performance_tests():
    return []
"""
RACES = GEN_INPUT.replace("return []", "return [Test(lambda: torch.randn(64, 64), scale=2.0)]")
REFERENCE = "def shrink_reference(x, scale):\n    return x / scale\n"
RIGHT = "def shrink_kernel_impl(x, scale):\n    return x * (1 / scale)\n"
WRONG = RIGHT.replace("1 / scale", "2 / scale")
PASSED = {"shrink": {("passed", "")}}


class Customs:
    """A root of custom operators, and runs in which a model writes kernels for them."""

    def __init__(self, making: Making, root: Path) -> None:
        self.root = root
        self.making = making
        self.out = making.out
        self.winners = making.out / "generated_kernels"

    def write(self, op: str, **files: str) -> Path:
        folder = self.root / op
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    def run(
        self,
        server: ModelServer,
        *,
        backend: str = "llm",
        resume: bool = False,
        into: Path | None = None,
        **options: Any,
    ) -> RunResult:
        provider = "anthropic" if isinstance(server, AnthropicServer) else "openai"
        asked = {"provider": provider, "url": server.url, "dsl": "pytorch", "rounds": 3, **options}
        config = RunConfig(
            "custom_ops",
            backend,
            custom_ops_root=str(self.root),
            ops_directory=str(into or self.winners),
            generation=GenerationOptions(**asked).as_json(),
            timeout_s=20.0,
        )
        return run(config, self.out, resume=resume)

    def again(self, out: Path) -> RunResult:
        """Judge what was made, without a model."""
        return run(RunConfig("custom_ops", "custom_ops", custom_ops_root=str(self.winners), timeout_s=20.0), out)


@pytest.fixture
def customs(making: Making, tmp_path: Path) -> Customs:
    return Customs(making, tmp_path / "root")


def remarks(ended: RunResult) -> str:
    return " | ".join(ended.manifest.plan.remarks)


def kernels(ended: RunResult) -> list[str]:
    return [kernel.name for kernel in ended.manifest.plan.kernels]


@pytest.mark.slow
def test_right_at_once_and_judged_again_from_disk(customs, tmp_path):
    customs.write("shrink", gen_input=GEN_INPUT, shrink_reference=REFERENCE, shrink_mine=WRONG)
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        ended = customs.run(server)
    assert verdicts(ended) == PASSED
    assert kernels(ended) == ["shrink__llm_1"]
    assert ended.summary.exit_code == 0
    (asked,) = server.requests
    assert "shrink_kernel_impl(x, scale)" in asked.text
    assert REFERENCE in asked.text
    assert "shrink((T([5, 3], f32),), {'scale': 2.0})" in asked.text
    assert "compares with the reference" in json.dumps(asked.body["system"])
    assert "ATen" not in json.dumps(asked.body["system"])

    folder = customs.winners / "shrink"
    assert sorted(p.name for p in folder.iterdir() if p.is_file()) == [
        "gen_input.py",
        "shrink_llm_1.py",
        "shrink_reference.py",
    ]
    assert (folder / "shrink_llm_1.py").read_text() == RIGHT
    again = customs.again(tmp_path / "again")
    assert verdicts(again) == PASSED
    assert kernels(again) == ["shrink__llm_1"]
    assert again.manifest.plan.kernels[0].reference == "shrink_reference"
    (folder / "shrink_llm_1.py").write_text(WRONG)  # so that there is something to compare it with
    assert {verdict for verdict, _ in verdicts(customs.again(tmp_path / "wrong"))["shrink"]} == {"wrong"}
    assert sorted(p.name for p in (customs.root / "shrink").glob("*.py")) == [
        "gen_input.py",
        "shrink_mine.py",
        "shrink_reference.py",
    ]


@pytest.mark.slow
def test_a_wrong_kernel_is_mended_after_feedback_and_then_made_faster(customs):
    customs.write("shrink", gen_input=RACES, shrink_reference=REFERENCE)
    with OpenAIServer([Say(fenced(WRONG)), Say(fenced(RIGHT)), Say("no more ideas")]) as server:
        ended = customs.run(server, model="gpt-5", backend="kernel_agent")
    assert verdicts(ended) == PASSED
    assert kernels(ended) == ["shrink__kernel_agent_1"]
    second, third = server.requests[1].text, server.requests[2].text
    assert "The kernel is not right: 0 of 2 cases passed" in second
    assert "the reference has" in second
    assert "{'scale': -1.0}" in second
    assert "Speed against the reference" in third
    assert "ATen" not in second + third
    winner = json.loads(customs.making.text("shrink/winner.json"))
    assert "round 2: right" in winner["words"]
    assert "× the reference" in winner["words"]
    row = next(row for row in ended.store.rows())
    assert reproduce(customs.out, row.id, customs.out.parent / "one").is_same_verdict


@pytest.mark.slow
def test_an_implementation_taken_for_the_reference_stays_it_where_kernels_land(customs, tmp_path):
    mine = RIGHT.replace("x * (1 / scale)", "divide(x, scale)") + "\n\nfrom helping import divide\n"
    helping = "def divide(x, y):\n    return x / y\n"
    customs.write("shrink", gen_input=GEN_INPUT, shrink_mine=mine, shrink_other=WRONG, helping=helping)
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        ended = customs.run(server)
    assert verdicts(ended) == PASSED
    assert "shrink has no reference: shrink__mine is used instead" in remarks(ended)
    assert mine.strip() in server.requests[0].text
    assert helping.strip() in server.requests[0].text
    again = customs.again(tmp_path / "again")
    assert verdicts(again) == PASSED
    assert kernels(again) == ["shrink__llm_1"]
    assert again.manifest.plan.kernels[0].reference == "shrink_reference"
    (customs.winners / "shrink" / "shrink_llm_1.py").write_text(WRONG)
    assert {verdict for verdict, _ in verdicts(customs.again(tmp_path / "wrong"))["shrink"]} == {"wrong"}


@pytest.mark.slow
def test_operators_that_cannot_be_judged_are_passed_over_with_the_reason(customs):
    customs.write("shrink", gen_input=GEN_INPUT, shrink_reference=REFERENCE)
    customs.write("bare", gen_input=GEN_INPUT)
    customs.write("unread", gen_input=GEN_INPUT, unread_reference="def unread_reference(x:\n")
    customs.write("caseless", caseless_reference="def caseless_reference(x):\n    return x\n", caseless_a="")
    customs.write("lost", gen_input="1 / 0\n", lost_reference="def lost_reference(x):\n    return x\n")
    native = customs.write("native", gen_input=GEN_INPUT)
    (native / "native_fast.cpp").write_text("// nothing\n")
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        ended = customs.run(server)
    assert len(server.requests) == 1
    assert set(ended.summary.missing) == {"bare", "unread", "caseless", "lost", "native"}
    said = remarks(ended)
    assert "bare is skipped: it has neither a reference nor an implementation" in said
    assert "write bare_reference.py" in said
    assert "unread is skipped: unread_reference.py cannot be read" in said
    assert "caseless is skipped: none of its cases can be made" in said
    assert "lost is skipped" in said
    assert "native is skipped: its only implementation is native_fast.cpp" in said
    assert ended.summary.exit_code == 0


def test_a_reference_that_answers_to_nothing_costs_one_request(customs):
    customs.write("shrink", gen_input=GEN_INPUT, shrink_reference="import nowhere_to_be_found\n" + REFERENCE)
    with AnthropicServer(repeat(Say(fenced(RIGHT)))) as server:
        ended = customs.run(server)
    assert len(server.requests) == 1
    assert {verdict for verdict, _ in verdicts(ended)["shrink"]} == {"error"}
    assert "nowhere_to_be_found" in remarks(ended)
    rejected = customs.out / "rejected_kernels" / "shrink"
    assert (rejected / "shrink_llm_1.py").read_text() == RIGHT
    assert not customs.winners.exists()


@pytest.mark.slow
def test_an_operator_without_cases_for_correctness_is_timed_all_the_same(customs):
    races = RACES.replace(
        "[Test(lambda: torch.randn(5, 3), scale=2.0), Test(lambda: torch.randn(7), scale=-1.0)]", "[]"
    )
    customs.write("shrink", gen_input=races, shrink_reference=REFERENCE)
    with AnthropicServer([Say(fenced(WRONG)), Say(fenced(RIGHT)), Say("that is all")]) as server:
        assert verdicts(customs.run(server)) == PASSED
    assert "The kernel is not right" in server.requests[1].text


def test_kernels_may_go_among_the_users_own_and_overwrite_none(customs):
    taken = "# the user's own\n"
    folder = customs.write("shrink", gen_input=GEN_INPUT, shrink_reference=REFERENCE, shrink_llm_1=taken)
    before = {path.name: path.read_text() for path in folder.glob("*.py")}
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        ended = customs.run(server, into=customs.root)
    assert kernels(ended) == ["shrink__llm_2"]
    after = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert after == {**before, "shrink_llm_2.py": RIGHT}


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            "root",
            "shrink has no reference of its own, and they would be used as its reference; write shrink_reference.py",
        ),
        ("other", "gen_input.py there differs from the one in"),
    ],
)
def test_a_folder_where_kernels_would_be_compared_with_something_else_is_refused(customs, tmp_path, there, said):
    customs.write("shrink", gen_input=GEN_INPUT, shrink_mine=RIGHT)
    shutil.copytree(customs.root, tmp_path / "other")
    (tmp_path / "other" / "shrink" / "gen_input.py").write_text(RACES)
    with AnthropicServer([]) as server, pytest.raises(OpforgeError, match=said):
        customs.run(server, into=tmp_path / there)
    assert not server.requests


def test_resumed_it_asks_nothing_twice_and_refuses_another_reference(customs, monkeypatch):
    def broken(_self, _job):
        raise InternalError("the machine went away")

    folder = customs.write("shrink", gen_input=GEN_INPUT, shrink_reference=REFERENCE)
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        with monkeypatch.context() as patched, pytest.raises(InternalError):
            patched.setattr(JudgingService, "judge", broken)
            customs.run(server)
        (folder / "shrink_reference.py").write_text(REFERENCE.replace("/", "*"))
        with pytest.raises(RunDirectoryError, match=r"shrink_reference\.py has changed since the run started"):
            customs.run(server, resume=True)
        (folder / "shrink_reference.py").write_text(REFERENCE)
        assert verdicts(customs.run(server, resume=True)) == PASSED
        shutil.rmtree(customs.winners)
        (customs.out / "generation" / "summary.json").unlink()
        assert verdicts(customs.run(server, resume=True)) == PASSED  # what was kept is put back, with its companions
    assert len(server.requests) == 1
    assert (customs.winners / "shrink" / "gen_input.py").read_text() == GEN_INPUT


@pytest.mark.slow
def test_killed_halfway_and_resumed_no_answered_request_is_sent_twice(tmp_path):
    out, killed = tmp_path / "run", False
    for op in ("shrink", "squeeze"):
        folder = tmp_path / "root" / op
        folder.mkdir(parents=True)
        (folder / "gen_input.py").write_text(GEN_INPUT)
        (folder / f"{op}_reference.py").write_text(REFERENCE.replace("shrink", op))

    def answer(seen):
        op = next(op for op in ("shrink", "squeeze") if f"{op}_kernel_impl" in seen.text)
        if len(seen.body["messages"]) == 1:
            return Say(fenced(WRONG.replace("shrink", op)))
        return Hang() if op == "squeeze" and not killed else Say(fenced(RIGHT.replace("shrink", op)))

    with AnthropicServer(answer) as server:
        keys = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url}
        words = ["run", "--suite", "custom_ops", "--custom-ops-root", str(tmp_path / "root"), "--backend", "llm"]
        process = start([*words, "--dsl", "pytorch", "--out", str(out)], keys)
        wait_for(process, lambda: kept(out) == {"shrink"} and len(server.requests) == 4)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed = True
        done = opforge("run", "--resume", str(out), "--format", "json", **keys)
    assert done.returncode == 0, done.stderr
    assert len(server.requests) == 5  # with the one that was never answered
    assert json.loads(done.stdout)["scores"]["correctness"] == 1.0
    assert {path.stem for path in out.glob("generated_kernels/*/*_llm_*.py")} == {"shrink_llm_1", "squeeze_llm_1"}


def test_prompts_of_ones_own(customs, tmp_path):
    (tmp_path / "first_custom.md.j2").write_text("Mine for {{ op }} as {{ entry }}: {{ sources | length }}.")
    customs.write("shrink", gen_input=GEN_INPUT, shrink_reference=REFERENCE)
    with AnthropicServer([Say(fenced(RIGHT))]) as server:
        customs.run(server, prompts=str(tmp_path))
    assert server.requests[0].text.strip() == "Mine for shrink as shrink_kernel_impl: 1."
