"""Custom operators as users type them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.command import opforge
from tests.conftest import ROOT, slow

EXAMPLES = "examples/custom_ops"
WORDS = ("run", "--suite", "custom_ops", "--backend", "custom_ops", "--custom-ops-root")


@pytest.mark.slow
def test_the_examples_are_what_they_are_said_to_be(tmp_path):
    done = opforge(*WORDS, EXAMPLES, "--out", str(tmp_path / "run"), "--format", "json")
    assert done.returncode == 1, done.stderr
    found = {o["kernel"]: o for o in json.loads(done.stdout)["operators"]}
    assert found["scaled_add__half"]["reasons"][0]["verdict"] == "wrong"
    for kernel in ("scaled_add__fused", "scaled_add__steps", "swish__plain", "swish__silu", "row_norm__triton"):
        assert found[kernel]["reasons"] == [], kernel
    assert found[None]["op"] == "clip_sum"
    report = opforge("report", str(tmp_path / "run")).stdout
    assert "note swish has no reference: swish__plain is used instead" in report
    assert "note clip_sum has no implementation" in report


@pytest.mark.parametrize("command", [["-m", "BackendBench.scripts.main"], slow(["BackendBench/scripts/main.py"])])
@pytest.mark.slow
def test_the_known_names_and_one_operator(command, tmp_path):
    words = [*command, *WORDS[1:], EXAMPLES, "--ops", "swish", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "swish__silu" in done.stdout
    assert "scaled_add" not in done.stdout


def test_lists():
    words = ("--suite", "custom_ops", "--custom-ops-root", EXAMPLES)
    kernels = opforge("ls", "kernels", *words)
    assert "scaled_add__fused" in kernels.stdout, kernels.stderr
    assert "compared with scaled_add_reference" in kernels.stdout
    assert "note: swish has no reference" in kernels.stdout
    ops = opforge("ls", "ops", *words, "--ops", "scaled_add")
    assert "4 cases for correctness,    1 for performance, 3 implementations" in ops.stdout, ops.stderr
    assert "swish" not in ops.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((*WORDS, "/nowhere"), 2, "there is no folder '/nowhere' of custom operators; name it with --custom-ops-root"),
        ((*WORDS, "."), 5, "no custom operator in"),
        ((*WORDS, str(ROOT / EXAMPLES), "--ops", "swich"), 2, "unknown custom operator 'swich'; did you mean 'swish'?"),
        ((*WORDS, str(ROOT / EXAMPLES), "--ops", "clip_sum"), 5, "clip_sum has no implementation clip_sum_NAME.py"),
        (("ls", "ops", "--suite", "custom_ops", "--custom-ops-root", "/nowhere"), 2, "there is no folder '/nowhere'"),
        (("ls", "kernels", "--suite", "custom_ops", "--custom-ops-root", "/nowhere"), 2, "there is no folder '/nowhere'"),
        (("run", "--suite", "custom_ops", "--backend", "aten", "--custom-ops-root", str(ROOT / EXAMPLES)), 5, "implements none"),
    ],
)  # fmt: skip
def test_bad_input(words, code, message, tmp_path):
    done = opforge(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
