"""A run that is broken off while kernels are made: what was answered is not asked again."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from opforge.errors import InternalError
from opforge.runs.execute.service import JudgingService
from tests.command import opforge
from tests.conftest import ROOT, verdicts
from tests.generate.making import KEY, RELU, WRONG, fenced, making
from tests.generate.servers import AnthropicServer, Hang, Say

__all__ = ["making"]
NAMED = "import torch\n\n\ndef {name}_kernel_impl(self):\n    return {body}\n"
RIGHT = {
    "relu": RELU,
    "frac": NAMED.format(name="frac", body="self - torch.trunc(self)"),
    "square": NAMED.format(name="square", body="self * self"),
}


def test_a_reply_that_was_not_judged_is_judged_and_not_asked_for_again(making, monkeypatch):
    def broken(_self, _job):
        raise InternalError("the machine went away")

    with AnthropicServer([Say(fenced(RELU))]) as server:
        with monkeypatch.context() as patched, pytest.raises(InternalError):
            patched.setattr(JudgingService, "judge", broken)
            making.run(server)
        assert making.text("relu/worker_1/round_1/reply.md") == fenced(RELU)
        with (making.out / "generation" / "requests.jsonl").open("a") as handle:
            handle.write('{"op": "rel')  # what a process killed in the middle of a line leaves
        ended = making.run(server, resume=True)
    assert verdicts(ended) == {"relu.default": {("passed", "")}}
    assert len(server.requests) == 1
    assert json.loads(making.text("summary.json"))["requests"] == 1


@pytest.mark.slow
def test_what_was_spent_before_counts(making, monkeypatch):
    def broken(_self, _job):
        raise InternalError("the machine went away")

    with AnthropicServer([Say(fenced(WRONG), input_tokens=9_000), Say(fenced(RELU))]) as server:
        with monkeypatch.context() as patched, pytest.raises(InternalError):
            patched.setattr(JudgingService, "judge", broken)
            making.run(server, max_tokens=10_000, reply_tokens=1024)
        making.run(server, max_tokens=10_000, reply_tokens=1024, resume=True)
    assert len(server.requests) == 1
    assert "budget is spent: 9050 of 10000 tokens" in json.loads(making.text("summary.json"))["stopped"]


@pytest.mark.slow
def test_killed_halfway_and_resumed_no_answered_request_is_sent_twice(tmp_path):
    out = tmp_path / "run"
    killed = False

    def answer(seen):
        name = next(name for name in RIGHT if f"{name}_kernel_impl" in seen.text)
        if len(seen.body["messages"]) == 1:
            return Say(fenced(WRONG.replace("relu", name)))
        return Hang() if name == "frac" and not killed else Say(fenced(RIGHT[name]))

    with AnthropicServer(answer) as server:
        chosen = ["--suite", "opinfo", "--dtypes", "f32", "--ops", ",".join(RIGHT)]
        words = ["run", *chosen, "--backend", "llm", "--dsl", "pytorch"]
        keys = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url}
        process = start([*words, "--out", str(out)], keys)
        wait_for(process, lambda: kept(out) == {"relu", "square"} and len(server.requests) == 6)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed = True
        done = opforge("run", "--resume", str(out), "--format", "json", **keys)
    assert done.returncode == 0, done.stderr
    asked = Counter(json.dumps(seen.body, sort_keys=True) for seen in server.requests)
    again = [json.loads(body) for body, count in asked.items() if count > 1]
    assert len(server.requests) == 7
    assert ["frac_kernel_impl" in request["messages"][0]["content"] for request in again] == [
        True
    ]  # the one that was never answered
    assert json.loads(done.stdout)["scores"]["correctness"] == 1.0
    assert kept(out) == set(RIGHT)
    assert not [path for path in out.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def kept(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("generation/*/winner.json")}


def start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "opforge.cli", *words]
    heeded = functools.partial(
        signal.signal, signal.SIGINT, signal.default_int_handler
    )  # background jobs may ignore it
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeded,  # noqa: PLW1509  # it only sets a signal
    )


def wait_for(process: subprocess.Popen[str], happened) -> None:
    while not happened():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.05)


@pytest.mark.slow
def test_an_interrupt_ends_at_once_while_a_model_is_silent_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    with AnthropicServer(lambda _seen: Hang()) as server:
        keys = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url}
        process = start(["run", "--backend", "llm", "--out", str(out)], keys)
        wait_for(process, lambda: len(server.requests) == 1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"opforge run --resume {out}" in said
    assert KEY not in said
