"""BackendBench's scripts, suites, backends and reports."""

from __future__ import annotations

import json
import sys

import pyarrow.parquet as pq
import pytest
import torch
from BackendBench.backends import DirectoryBackend, KernelAgentBackend, LLMBackend
from BackendBench.eval import CorrectnessTestResult, PerformanceTestResult, eval_correctness
from BackendBench.output import save_results
from BackendBench.scripts import exit_on_error, parquet_trace_converter
from BackendBench.scripts.create_simple_test_ops import create_simple_test_ops
from BackendBench.scripts.setup_operator_directories import setup_operator_directories
from BackendBench.suite import FactoTestSuite, OpInfoTestSuite, OpTest, Test, TorchBenchOpTest, TorchBenchTestSuite

from opforge.errors import OpforgeError

LOG = """\
Operator: aten.relu.default
cnt: 3, ((T([2, 3], f32, [1, 2]),), {})
cnt: 0, ((T([5], f32),), {})
Operator: aten.abs.default
cnt: 1, ((T([64, 4], f32),), {})
"""


def test_simple_kernels_are_right(tmp_path):
    create_simple_test_ops(tmp_path)
    backend = DirectoryBackend(tmp_path)
    x = torch.tensor([[-1.0, 2.0], [0.0, 4.0]])
    assert len(backend.compiled_kernels) == 5
    for op, kernel in backend.compiled_kernels.items():
        args = (x, x) if op.overloadpacket in (torch.ops.aten.add, torch.ops.aten.mul) else (x,)
        torch.testing.assert_close(kernel(*args), op(*args))
    score, results = eval_correctness(
        torch.ops.aten.add.Tensor,
        backend[torch.ops.aten.add.Tensor],
        [Test(lambda: torch.randn(3), lambda: torch.randn(3))],
    )
    assert score == 1.0, results


@pytest.mark.slow
def test_folders_of_a_suite_are_made_once(tmp_path, capsys):
    setup_operator_directories(tmp_path, suite="torchbench")
    setup_operator_directories(tmp_path, suite="torchbench")
    first, again = capsys.readouterr().out.splitlines()
    made = first.split()[0]
    assert again == f"0 kernels to fill in under {tmp_path}, {made} left as they were"
    for name in ("relu__default", "add__Tensor", "_softmax__default"):
        assert (tmp_path / name / f"{name}_implementation_1.py").is_file()
    assert len(DirectoryBackend(tmp_path).compiled_kernels) == int(made)


def test_logs_become_tables_and_back(tmp_path, monkeypatch):
    log, table = tmp_path / "calls.txt", tmp_path / "calls.parquet"
    log.write_text(LOG)
    words = ["--trace-file", str(log), "--parquet-name", str(table)]
    monkeypatch.setattr(sys, "argv", ["converter", *words])
    parquet_trace_converter.main()
    rows = pq.read_table(table).to_pylist()
    assert [(row["op_name"], row["count"], row["included_in_benchmark"]) for row in rows] == [
        ("aten.relu.default", 3, True), ("aten.relu.default", 0, False), ("aten.abs.default", 1, True),
    ]  # fmt: skip
    back = tmp_path / "back.txt"
    parquet_trace_converter.convert_parquet_to_trace(table, back, limit=1)
    assert back.read_text() == "Operator: aten.abs.default\ncnt: 1, ((T([64, 4], f32),), {})\n"
    monkeypatch.setattr(sys, "argv", ["converter", *words, "--upload-to-hf"])
    with pytest.raises(SystemExit, match="2"):
        exit_on_error(parquet_trace_converter.main)


def test_suites_have_inputs(tmp_path):
    (tmp_path / "calls.txt").write_text(LOG)
    suite = TorchBenchTestSuite("mine", tmp_path / "calls.txt", filter=["relu"], topn=1)
    (test,) = suite
    assert test.op is torch.ops.aten.relu.default
    ((x,),) = [t.args for t in test.performance_tests]
    assert (x.shape, x.stride()) == ((2, 3), (1, 2))
    op_test = TorchBenchOpTest("aten.relu.default", ["((T([2], f16),), {})", "((T([9], f16),), {})"], 1)
    assert [t.args[0].shape for t in op_test.correctness_tests] == [(9,)]
    opinfo = OpInfoTestSuite("mine", "cpu", torch.float32, filter=["relu"])
    assert torch.ops.aten.relu.default in [test.op for test in opinfo]
    for test in opinfo:
        for t in list(test.correctness_tests)[:3]:
            test.op(*t.args, **t.kwargs)
    with pytest.raises(OpforgeError, match="use OpInfoTestSuite"):
        FactoTestSuite("mine", "cpu", torch.float32)


def test_results_are_saved(tmp_path):
    right = [CorrectnessTestResult("add.Tensor", "a", is_correct=True), CorrectnessTestResult("mul.Tensor", "b")]
    timed = [PerformanceTestResult("add.Tensor", "a", 2.0, 1.0, 2.0, successfully_ran=True)]
    save_results(right, timed, tmp_path / "out", "a command", 0.5, 2.0, 0.5)
    out = tmp_path / "out"
    assert [row["op_name"] for row in json.loads((out / "full_results.json").read_text())] == ["add.Tensor"] * 2 + [
        "mul.Tensor"
    ]
    assert [row["args"] for row in json.loads((out / "failed_tests.json").read_text())] == ["b"]
    assert (out / "operator_summary.csv").read_text().splitlines()[1].startswith("add.Tensor,2,1,1,1,1,0,0,1.0,2.0,2.0")
    assert "| add.Tensor | 100.0000% | 2.0000x |" in (out / "OVERALL_SUMMARY.md").read_text()


class Client:
    """Answers with a wrong kernel, then with a right one, as a model does."""

    def __init__(self):
        self.prompts = []

    def call_llm(self, prompt):
        self.prompts.append(prompt)
        body = "self" if len(self.prompts) == 1 else "torch.where(self <= 0, 0, self)"
        return f"```python\nimport torch\n\ndef relu_kernel_impl(self):\n    return {body}\n```"


def test_a_client_writes_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = Client()
    backend = LLMBackend("mine", client)
    tests = [Test(lambda: torch.tensor([-1.0, 2.0]))]
    backend.generate_kernels([OpTest(torch.ops.aten.relu.default, tests, [])], 3, "pytorch")
    assert len(client.prompts) == 2
    assert "return self\n" in client.prompts[1]  # its own first attempt, with feedback on it
    assert backend[torch.ops.aten.relu.default](torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    agent = KernelAgentBackend()
    agent.set_config(num_workers=8, max_rounds=20)
    assert (agent.num_workers, agent.max_rounds, agent.name) == (8, 20, "kernel_agent")
