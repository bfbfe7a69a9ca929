"""The suite that is shipped: what is in it, what is said of it, and that it runs."""

from __future__ import annotations

import json

from opforge.reports.trace_page import markdown
from opforge.suites.torchbench import DATA
from opforge.traces import trace_file
from tests.command import opforge
from tests.conftest import ROOT

KINDS = {
    "encoder": "BertForMaskedLM", "decoder": "LlamaForCausalLM", "encoder-decoder": "T5ForConditionalGeneration",
    "mixture of experts": "MixtralForCausalLM", "vision": "ViTForImageClassification", "audio": "WhisperForConditionalGeneration",
    "multimodal": "CLIPModel", "state-space": "MambaForCausalLM", "convolution": "resnet50",
}  # fmt: skip


def test_it_holds_what_is_promised():
    trace = trace_file.read_trace(DATA)
    models = {seen.model for call in trace.calls for seen in call.seen}
    assert len(models) >= 60
    assert set(KINDS.values()) <= models
    assert trace.operators >= 150
    assert {seen.phase for call in trace.calls for seen in call.seen} == {"forward", "backward", "optimizer"}
    assert len({(call.op, call.args, call.digest) for call in trace.calls}) == len(trace.calls)
    assert DATA.stat().st_size < 8 << 20
    assert trace.metadata["device"].startswith("cuda")
    assert not trace.metadata["fake"]


def test_its_page_is_of_this_file():
    assert (ROOT / "docs" / "torchbench.md").read_text() == markdown(trace_file.read_trace(DATA), DATA)


def test_it_is_a_suite_by_name(tmp_path):
    words = ("--suite", "torchbench", "--backend", "aten", "--ops", "embedding", "--topn", "1")
    done = opforge("run", *words, "--max-mib", "1", "--out", str(tmp_path / "run"), "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {(row["op"], row["phase"], row["verdict"]) for row in rows} == {
        (op, phase, "passed") for op in ("embedding.default",) for phase in ("correctness", "performance")
    }
