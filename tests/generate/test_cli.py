"""`opforge run` with kernels by language models, from the words to the reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import repeat

import pytest

from opforge.cli.generation import print_generation_summary
from tests.command import opforge
from tests.conftest import ROOT
from tests.generate.making import KERNELS, KEY, fenced
from tests.generate.servers import AnthropicServer, OpenAIServer, Say
from tests.generate.steps import Status

OPS = "relu,add.Scalar,softmax"
CHOSEN = ["--suite", "opinfo", "--dtypes", "f32", "--ops", OPS, "--format", "json"]
BROKEN = "def {name}_kernel_impl(*args, **kwargs):\n    return args[0] + undefined\n"


def named(text: str) -> str:
    return next(name for name in ("relu", "add", "softmax") if f"{name}_kernel_impl" in text)


def right(name: str) -> str:
    return fenced((KERNELS / f"{name}.py").read_text())


def check(done: subprocess.CompletedProcess[str], out) -> None:
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["scores"]["correctness"] == 1.0
    assert said["scores"]["operators"] == len(said["operators"]) == 6
    assert "3 of 3 kernels right" in done.stderr
    for name in ("relu", "add", "softmax"):
        folder = out / "generated_kernels" / name
        assert sorted(p.name for p in folder.iterdir()) == [
            f"{name}_implementation_1.proof.json",
            f"{name}_implementation_1.py",
        ]
    assert (out / "report.html").exists()
    assert not [path for path in out.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_attempts_with_feedback_for_several_operators(tmp_path):
    def answer(seen):
        name = named(seen.body["messages"][0]["content"])
        first = len(seen.body["messages"]) == 1
        return Say(fenced(BROKEN.format(name=name)) if first else right(name))

    out = tmp_path / "run"
    with AnthropicServer(answer) as server:
        done = opforge(
            "run", *CHOSEN, "--backend", "llm", "--llm-attempts", "3", "--out", str(out),
            ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url,
        )  # fmt: skip
    check(done, out)
    assert len(server.requests) == 6
    told = [seen.text for seen in server.requests if len(seen.body["messages"]) > 1]
    assert [text for text in told if "NameError" not in text] == []


@pytest.mark.slow
def test_six_workers_and_fifteen_rounds_by_the_known_name(tmp_path):
    def answer(seen):
        task = seen.body["messages"][1]["content"]
        name = named(task)
        mended = "worker 5 of 6" in task and len(seen.body["messages"]) > 2
        return Say(right(name) if mended else fenced(BROKEN.format(name=name)))

    out = tmp_path / "run"
    words = [
        "--backend",
        "kernel_agent",
        "--kernel-agent-workers",
        "6",
        "--kernel-agent-max-rounds",
        "15",
        "--out",
        str(out),
    ]
    with OpenAIServer(answer) as server:
        done = subprocess.run(
            [sys.executable, "-m", "BackendBench.scripts.main", *CHOSEN, *words, "--parallel", "18"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": server.url},
            check=False,
        )
    check(done, out)
    assert len(server.requests) < 3 * 6 * 15
    assert {seen.body["model"] for seen in server.requests} == {"gpt-6.1-sol"}
    assert re.search(r"worker 5, round \d+: right", (out / "generation" / "add" / "winner.json").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "llm", "--dsl", "cuda"], "--dsl cuda requires --device cuda"),
        (["--backend", "llm", "--dsl", "tritn"], "unknown DSL 'tritn'; did you mean 'triton'"),
        (["--backend", "llm", "--llm-model", "llama"], "use --backend llm-relay"),
        (["--backend", "llm-relay", "--llm-relay-url", "http://localhost:1/v1"], "give --llm-model"),
        (["--backend", "llm", "--llm-attempts", "0"], "must be 1 to 1,000"),
        (["--backend", "llm", "--max-cost", "-1"], "--max-cost -1.0 is out of range"),
        (
            ["--backend", "llm", "--kernel-agent-workers", "2"],
            "--kernel-agent-workers requires --backend kernel_agent, not llm",
        ),
        (
            ["--backend", "directory", "--max-tokens", "9"],
            "--max-tokens requires --backend llm or llm-relay or kernel_agent, not directory",
        ),
        (["--backend", "llm", "--prompts", "nowhere"], "nowhere' is not a folder"),
        (["--backend", "llm"], "ANTHROPIC_API_KEY"),
        (["--backend", "kernel_agent"], "OPENAI_API_KEY"),
        (["--backend", "llm", "--transcript", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_word_is_answered(words, said, tmp_path, monkeypatch, capsys):
    from opforge.cli.main import call

    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert call(["run", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_was_made_and_spent_is_said_at_the_end(tmp_path, capsys):
    assert print_generation_summary(tmp_path)
    assert capsys.readouterr().err == ""  # a run that asks no model
    row = {
        "model": "m",
        "right": 1,
        "operators": {"relu": {"file": "relu.py"}},
        "attempts": 4,
        "requests": 5,
        "unpriced": 0,
    }
    row |= {"input_tokens": 9_000, "output_tokens": 50, "cost": 0.12345, "stopped": ""}
    file = tmp_path / "generation" / "summary.json"
    file.parent.mkdir()
    file.write_text(json.dumps(row))
    assert print_generation_summary(tmp_path)
    spent = "m: 1 of 1 kernels right after 4 attempts, 5 requests, 9050 tokens, 0.1235 USD"
    assert capsys.readouterr().err == f"{spent}\n"
    bounds = {"max_cost": None, "max_tokens": 10_000}
    file.write_text(json.dumps({**row, "unpriced": 2, "stopped": "the budget is spent", "bounds": bounds}))
    print_generation_summary(tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        f"{spent}, and 2 requests with unknown prices",
        "the budget is spent",
        f"continue with a larger one: `opforge run --resume {tmp_path} --max-tokens N`",
    ]
    file.write_text(json.dumps({**row, "operators": {"add": {"file": None, "attempts": 5, "words": "no \x1b code"}}}))
    assert not print_generation_summary(tmp_path)
    assert capsys.readouterr().err.splitlines()[1:] == ["opforge: add has no kernel after 5 attempts: no \\x1b code"]


@pytest.mark.parametrize(
    ("step", "lines"),
    [
        (
            Say("I cannot."),
            ["relu: attempt 5 of 5: no kernel: the reply", "relu has no kernel after 5 attempts: the reply"],
        ),
        (
            Status(401),
            ["relu: attempt 1 of 5: no reply: anthropic: status 401", "check the key in ANTHROPIC_API_KEY; then"],
        ),
    ],
    ids=["unusable replies", "a rejected key"],
)
def test_without_any_kernel_the_exit_code_is_1(step, lines, tmp_path):
    with AnthropicServer(repeat(step)) as server:
        done = opforge(
            "run", "--backend", "llm", "--dsl", "pytorch", "--out", str(tmp_path / "run"),
            ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for line in lines:
        assert line in done.stderr
