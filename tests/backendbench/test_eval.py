"""``BackendBench.eval``: operators, kernels of backends and Python functions, judged in the real sandbox."""

from __future__ import annotations

import pytest
import torch
from BackendBench.backends import AtenBackend, CustomOpsBackend, DirectoryBackend
from BackendBench.eval import allclose, eval_correctness, eval_one_op, perf_at_p
from BackendBench.multiprocessing_eval import MultiprocessingEvaluator
from BackendBench.suite import CustomOpsTestSuite, OpTest, SmokeTestSuite, Test, TestSuite, randn

from opforge.errors import OpforgeError
from tests.conftest import ROOT

SCALE = 2
TESTS = [Test(lambda: torch.tensor([-1.0, 2.0])), Test(lambda: torch.randn(4, 3).t())]


def doubled(x):
    return x * SCALE


def positive(x):
    return torch.where(x <= 0, 0, x)


def wraps(x):
    return torch.relu(x)


def raises(x):
    raise ValueError("not today")


@pytest.mark.slow
def test_the_smoke_suite_on_aten():
    (test,) = SmokeTestSuite
    backend = AtenBackend()
    assert test.op in backend
    correctness, speed, right, timed = eval_one_op(
        test.op, backend[test.op], test.correctness_tests, test.performance_tests
    )
    assert (correctness, len(right), len(timed)) == (1.0, 1, 1)
    assert speed.item() == pytest.approx(timed[0].speedup)
    assert timed[0].successfully_ran
    assert timed[0].benchmark_time_ms > 0
    assert timed[0].args == "((T([1024, 1024], f32),), {})"


def test_functions_are_judged_from_their_source():
    score, results = eval_correctness(torch.ops.aten.relu.default, positive, [*TESTS, TESTS[0]])
    assert (score, len(results)) == (1.0, 3)  # equal tests have a result each
    score, (result, _other) = eval_correctness(torch.relu, doubled, TESTS)
    assert (score, result.error_type, result.op_name) == (0.0, "wrong", "relu")


def test_a_function_in_a_function_may_raise_or_cheat():
    def inside(x):
        return raises(x)

    _, (result,) = eval_correctness(torch.relu, inside, TESTS[:1])
    assert (result.error_type, "not today" in result.error_msg) == ("error", True)
    _, (result,) = eval_correctness(torch.relu, wraps, TESTS[:1])
    assert result.error_type == "cheated"
    assert "--allow-fallback" in result.error_msg


def test_what_cannot_be_judged_is_said():
    factor = 2

    def closure(x):
        return x * factor

    for impl, reason in (
        (lambda x: x, "it is a lambda"),
        (closure, "it uses factor of the function around it"),
        (torch.nn.ReLU(), "neither an ATen operator, nor a backend's kernel, nor a Python function"),
        (torch.abs, "ATen's own abs.default, and no kernel for relu.default"),
    ):
        with pytest.raises(OpforgeError, match=reason):
            eval_correctness(torch.relu, impl, TESTS)
    with pytest.raises(OpforgeError, match="a case cannot hold a set"):
        eval_correctness(torch.relu, positive, [Test(lambda: {1})])


def test_a_directory_is_judged_without_being_loaded(kernel_directory):
    root = kernel_directory({"relu": "import torch\ndef relu_kernel_impl(self):\n    return self.double()\n"})
    backend = DirectoryBackend(root)
    assert torch.ops.aten.relu.default in backend
    assert torch.ops.aten.abs.default not in backend
    kernel = backend[torch.ops.aten.relu.default]
    _, (result, _other) = eval_correctness(torch.ops.aten.relu.default, kernel, TESTS)
    assert result.error_type == "contract"
    assert kernel._loaded is None
    assert kernel(torch.ones(2)).dtype == torch.float64
    with pytest.raises(KeyError, match=r"backend directory has no kernel for aten.abs.default"):
        _ = backend[torch.ops.aten.abs.default]


@pytest.mark.slow
def test_operators_of_your_own_are_compared_with_their_reference():
    root = ROOT / "examples" / "custom_ops"
    backend, suite = CustomOpsBackend(root), CustomOpsTestSuite(custom_ops_root=root, filter=["scaled_add"])
    scores = {str(test.op): eval_correctness(test.op, backend[test.op], test.correctness_tests)[0] for test in suite}
    assert scores.pop("scaled_add__half") < 1
    assert scores == {"scaled_add__fused": 1.0, "scaled_add__steps": 1.0}


def test_several_operators():
    suite = TestSuite("mine", [OpTest(torch.ops.aten.abs.default, [Test(randn(3))], [])])
    with MultiprocessingEvaluator(num_workers=2) as evaluator:
        for test in suite:
            evaluator.submit_task(test.op, test.op, test.correctness_tests, test.performance_tests)
        evaluator.start_evaluation()
        (result,) = evaluator.get_results()
    assert (result.task_id, result.correctness_score, result.error) == (0, 1.0, None)


def test_scores():
    assert perf_at_p([True, True, False], [2.0, 1.0, 3.0], p=1.5).item() == pytest.approx(1 / 3)
    assert allclose([torch.tensor([1.0])], [torch.tensor([1.005])])
    assert not allclose((1, 2), (1, 2, 3))
