"""Several kernels of one operator in one run: each case is judged once for each, resumed, scored and compared."""

from __future__ import annotations

import json

import pytest

from opforge.errors import NothingToJudgeError, RunDirectoryError
from opforge.reports.run_files import write_reports
from opforge.reports.terminal import console_for_results, print_run
from opforge.runs import RunConfig, run
from opforge.runs.speed import Ratio, divide
from tests.conftest import by_kernel, gen_input, slow

FILES = {
    "gen_input.py": gen_input("Test(lambda: torch.randn(6))", "Test(lambda: torch.randn(3, 2))", performance="Test(lambda: torch.randn(20000))"),
    "twice_reference.py": "def twice_reference(x):\n    return 2 * x\n",
    "twice_add.py": "def twice_kernel_impl(x):\n    return x + x\n",
    "twice_slow.py": "def twice_kernel_impl(x):\n    for _ in range(40):\n        y = 2 * x\n    return y\n",
    "twice_wrong.py": "def twice_kernel_impl(x):\n    return 3 * x\n",
}  # fmt: skip


@pytest.mark.slow
def test_every_kernel_is_judged_on_every_case_and_compared(judge_custom, tmp_path, capsys):
    ended = judge_custom({"twice": FILES})
    rows = list(ended.store.rows())
    keys = [(row.kernel, row.op, row.id, row.phase) for row in rows]
    assert len(keys) == len(set(keys)) == ended.manifest.plan.cases == 9
    assert {v for v, _ in by_kernel(ended)["twice__wrong"]} == {"wrong"}
    summary = ended.summary
    assert (summary.operator_count, len(summary.judged), sum(t.is_correct for t in summary.judged)) == (3, 3, 2)
    assert summary.correctness == pytest.approx(2 / 3)
    assert summary.timed_units == {"twice__add", "twice__slow", "twice__wrong"}
    write_reports(tmp_path / "run", summary)
    text = (tmp_path / "run" / "OVERALL_SUMMARY.md").read_text()
    lines = [line for line in text.partition("## Implementations compared")[2].splitlines() if "`twice__" in line][:3]
    assert ["fastest" in line for line in lines] == [True, False, False]
    assert "`twice__add`" in lines[0]
    assert "| right | `twice_reference` |" in lines[1]
    assert lines[1].count("[") == 2  # against the reference and against the fastest, each with its interval
    assert "3 wrong" in lines[2]
    table = (tmp_path / "run" / "operator_summary.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in table[1:]] == [["twice", f"twice__{n}"] for n in ("add", "slow", "wrong")]
    print_run(console_for_results(), ended.manifest, summary)
    title, heads, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "custom_ops on custom_ops (cpu)"
    assert " ".join(heads.split()) == "operator implementation passed verdict × reference × fastest reference"
    assert [line.split()[:4] for line in lines[:3]] == [
        ["twice", "twice__add", "3/3", "passed"],
        ["twice", "twice__slow", "3/3", "passed"],
        ["twice", "twice__wrong", "0/3", "3"],
    ]
    assert [line.split()[-1] for line in lines[:3]] == ["twice_reference"] * 3
    assert ["fastest" in line for line in lines[:3]] == [True, False, False]


@pytest.mark.slow
def test_a_broken_off_run_goes_on_with_the_cases_that_it_has(judge_custom, tmp_path):
    chance = "Test(lambda: torch.frombuffer(bytearray(__import__('os').urandom(24)), dtype=torch.uint8).float())"
    sources = {"twice": {**FILES, "gen_input.py": gen_input(*[chance] * 3)}}
    ended = judge_custom(sources)
    results = tmp_path / "run" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:4]))
    again = run(RunConfig.from_json(ended.manifest.config), tmp_path / "run", resume=True)
    rows = list(again.store.rows())
    assert [json.dumps(r.wire(), separators=(",", ":")) + "\n" for r in rows[:4]] == lines[:4]
    assert len({(row.kernel, row.id, row.phase) for row in rows}) == len(rows) == 9


@pytest.mark.parametrize("file", ["gen_input.py", slow("twice_reference.py"), slow("twice_add.py")])
@pytest.mark.slow
def test_a_run_does_not_go_on_when_what_it_rests_on_has_changed(judge_custom, tmp_path, file):
    ended = judge_custom({"twice": FILES})
    source = tmp_path / "custom" / "twice" / file
    source.write_text(source.read_text() + "\n")
    with pytest.raises(RunDirectoryError, match="has changed since the run started"):
        run(RunConfig.from_json(ended.manifest.config), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_what_stands_in_for_a_reference_is_in_the_report(judge_custom, tmp_path):
    files = {n: s for n, s in FILES.items() if n in ("gen_input.py", "twice_add.py")}
    ended = judge_custom({"twice": files, "nothing": {"gen_input.py": FILES["gen_input.py"]}})
    write_reports(tmp_path / "run", ended.summary)
    text = (tmp_path / "run" / "OVERALL_SUMMARY.md").read_text()
    assert "twice has no reference: twice__add is used instead" in text
    assert "nothing has neither a reference nor an implementation" in text
    assert "nothing has no implementation nothing_NAME.py: there is nothing to judge" in text
    assert ended.summary.missing == ("nothing",)
    assert ended.summary.correctness == 0.5
    assert ended.summary.exit_code == 0


def test_without_an_implementation_there_is_nothing_to_judge(judge_custom):
    with pytest.raises(
        NothingToJudgeError, match=r"twice has no implementation twice_NAME\.py: there is nothing to judge"
    ):
        judge_custom({"twice": {"gen_input.py": FILES["gen_input.py"]}})


def test_the_identity_stands_in_where_no_implementation_defines_the_function(judge_custom):
    ended = judge_custom({"twice": {"gen_input.py": FILES["gen_input.py"], "twice_a.py": "def a(x):\n    return x\n"}})
    reasons = by_kernel(ended)["twice__a"]
    assert reasons == {("error", "cannot be loaded: twice_a.py does not define twice_kernel_impl; it defines a")}
    assert any("the identity is its reference" in remark for remark in ended.manifest.plan.remarks)


def test_one_speed_over_another_has_an_interval_made_of_both():
    ratio = divide(Ratio(2.0, 1.8, 2.2), Ratio(4.0, 3.9, 4.2))
    assert ratio.value == pytest.approx(0.5)
    assert 2.0 / 4.2 * 0.8 < ratio.low < 0.5 * 1.8 / 2.0
    assert 0.5 * 2.2 / 2.0 < ratio.high < 2.2 / 3.9


NATIVE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor twice(const Tensor& x) {
  Tensor input = torch::stable::contiguous(x), result = torch::stable::empty_like(input);
  const auto* from = static_cast<const float*>(input.const_data_ptr());
  auto* to = static_cast<float*>(result.mutable_data_ptr());
  for (int64_t i = 0; i < input.numel(); ++i) to[i] = 2 * from[i];
  return result;
}

STABLE_TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("twice_kernel_impl(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(OPFORGE_NAMESPACE, CPU, m) { m.impl("twice_kernel_impl", TORCH_BOX(&twice)); }
"""


@pytest.mark.slow
def test_implementations_in_cpp_are_judged_and_stand_in_for_a_reference_like_others(judge_custom):
    tests = gen_input("Test(lambda: torch.randn(6))")
    files = {
        "gen_input.py": tests,
        "twice_native.cpp": NATIVE,
        "twice_broken.cpp": NATIVE.replace("2 * from[i]", "2 *"),
    }
    ended = judge_custom({"twice": {**files, "twice_reference.py": FILES["twice_reference.py"]}})
    verdicts = by_kernel(ended)
    assert {v for v, _ in verdicts["twice__native"]} == {"passed"}
    ((verdict, reason),) = set(verdicts["twice__broken"])
    assert verdict == "error"
    assert "twice_broken.cpp:12" in reason


@pytest.mark.slow
def test_without_a_reference_one_in_cpp_is_taken_for_it(judge_custom):
    files = {"gen_input.py": gen_input("Test(lambda: torch.randn(6))"), "twice_native.cpp": NATIVE}
    ended = judge_custom({"twice": files})
    assert {v for v, _ in by_kernel(ended)["twice__native"]} == {"passed"}
    assert any("twice__native is used instead" in remark for remark in ended.manifest.plan.remarks)
