"""gen_input.py runs in the sandbox; what it makes becomes cases, and what it does not make is said and keeps its place."""

from __future__ import annotations

import json

import pytest

from tests.conftest import by_kernel, gen_input

TWICE = {
    "twice_reference.py": "def twice_reference(x, by=2):\n    return by * x\n",
    "twice_py.py": "def twice_kernel_impl(x, by=2):\n    return x * by\n",
}
GOOD = gen_input("Test(lambda: torch.randn(3))")
FINE = {
    "gen_input.py": GOOD.replace("twice", "fine"),
    "fine_reference.py": "def fine_reference(x):\n    return x + 1\n",
    "fine_py.py": "def fine_kernel_impl(x):\n    return 1 + x\n",
}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "there is no gen_input.py; it must define get_correctness_tests()"),
        ("def get_correctness_tests(:\n", "gen_input.py, line 1: SyntaxError"),
        ("import nowhere_to_be_found\n", "gen_input.py raised while loading: ModuleNotFoundError"),
        ("x = 1\n", "gen_input.py does not define get_correctness_tests()"),
        (GOOD.replace("return [Test", "raise ValueError('no luck') or [Test"), "get_correctness_tests() raised ValueError: no luck"),
        (GOOD.replace("return [Test", "return 3 or [Test"), "get_correctness_tests() returned int, expected a list of Test(...)"),
        (GOOD.replace("[Test(lambda: torch.randn(3))]", "[torch.randn(3)]"), "returned a list with Tensor in it, expected Test(...)"),
        (gen_input(), "gen_input.py gives no tests: both of its lists are empty"),
        ("import time\ntime.sleep(60)\n", "gen_input.py: no answer within 2 s"),
        ("import os\nos.kill(os.getpid(), 11)\n", "gen_input.py: its process died of SIGSEGV"),
        ("import os\nos._exit(0)\n", "gen_input.py: its process exited with status 0"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80))\n", "tried to"),
        (gen_input("Test(lambda: {'a': 1})"), "correctness test 0 of gen_input.py: TypeError: argument 0 is a dict"),
        (gen_input("Test(lambda: torch.randn(3).to_sparse())"), "argument 0 is a tensor of layout torch.sparse_coo"),
        (gen_input("Test(lambda: 1 / 0)"), "correctness test 0 of gen_input.py: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_bad_file_is_the_verdict_of_its_operator_and_others_go_on(judge_custom, source, words):
    files = TWICE if source is None else {**TWICE, "gen_input.py": source}
    ended = judge_custom({"twice": files, "fine": FINE}, timeout_s=2.0)
    found = by_kernel(ended)
    assert found["fine__py"] == {("passed", "")}
    assert {verdict for verdict, _ in found["twice__py"]} == {"error"}
    assert any("its inputs could not be made" in reason and words in reason for _, reason in found["twice__py"]), found
    assert ended.summary.exit_code == 1
    assert ended.summary.correctness == 0.5
    assert any(words in loss for loss in ended.manifest.plan.losses)


def test_one_bad_test_does_not_cost_the_others_their_place(judge_custom):
    tests = gen_input("Test(lambda: torch.randn(3))", "Test(lambda: object())", "Test(lambda: torch.randn(4))")
    rows = list(judge_custom({"twice": {**TWICE, "gen_input.py": tests}}).store.rows())
    assert sorted(row.verdict for row in rows) == ["error", "passed", "passed"]


def test_a_test_that_hangs_or_dies_costs_itself_alone(judge_custom):
    tests = gen_input(
        "Test(lambda: torch.randn(3))",
        "Test(lambda: __import__('time').sleep(60))",
        "Test(lambda: __import__('os')._exit(3))",
        "Test(lambda: torch.randn(4))",
    )
    rows = list(judge_custom({"twice": {**TWICE, "gen_input.py": tests}}, timeout_s=2.0).store.rows())
    reasons = {row.source: (row.verdict, row.reason) for row in rows}
    assert reasons["correctness test 0"][0] == reasons["correctness test 3"][0] == "passed"
    assert "no answer within 2 s" in reasons["correctness test 1"][1]
    assert "its process exited with status 3" in reasons["correctness test 2"][1]


def test_cases_hold_what_was_made(judge_custom, tmp_path):
    tests = gen_input(
        "Test(lambda: torch.arange(12.).reshape(3, 4).T[1:], by=lambda: 3)",
        "Test(lambda: torch.ones(2, dtype=torch.bfloat16), 0.5)",
        "Test(lambda: torch.zeros(0, 4), by=True)",
    )
    ended = judge_custom({"twice": {**TWICE, "gen_input.py": tests}})
    assert by_kernel(ended) == {"twice__py": {("passed", "")}}
    cases = [row.case for row in ended.store.rows()]
    assert sum("T([3, 3], f32, stride=(1, 4), offset=1" in case and "'by': 3" in case for case in cases) == 1
    assert sum("T([2], bf16" in case and "0.5" in case for case in cases) == 1
    assert sum("T([0, 4], f32" in case for case in cases) == 1
    assert {p.name for p in (tmp_path / "run" / "inputs").iterdir()} == {"cases.json", "tensors.safetensors"}


def test_what_is_drawn_is_the_same_in_every_run_and_another_in_every_test(judge_custom, tmp_path):
    tests = gen_input("Test(lambda: torch.randn(3))", "Test(lambda: torch.randn(3))")
    judge_custom({"twice": {**TWICE, "gen_input.py": tests}})
    (tmp_path / "run").rename(tmp_path / "first")
    judge_custom({"twice": {**TWICE, "gen_input.py": tests}})
    first, second = (json.loads((tmp_path / d / "inputs" / "cases.json").read_text()) for d in ("first", "run"))
    assert first == second
    assert len({case["id"] for case in first}) == len({case["args"] for case in first}) == 2


def test_both_imports_give_tests(judge_custom):
    other = GOOD.replace("from opforge import Test", "from BackendBench.suite.base import Test")
    assert by_kernel(judge_custom({"twice": {**TWICE, "gen_input.py": other}})) == {"twice__py": {("passed", "")}}


def test_a_file_without_performance_tests_is_told_so(judge_custom):
    source = GOOD[: GOOD.index("def get_performance_tests")]
    rows = list(judge_custom({"twice": {**TWICE, "gen_input.py": source}}).store.rows())
    assert {(row.phase, row.verdict) for row in rows} == {("correctness", "passed"), ("performance", "error")}
    assert any("does not define get_performance_tests()" in row.reason for row in rows)
