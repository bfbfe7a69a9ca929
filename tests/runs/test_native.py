"""C++ sources in a kernel directory are judged like any other kernel."""

from __future__ import annotations

import pytest

from opforge.errors import RunDirectoryError
from opforge.runs import RunConfig, run
from tests.conftest import UNARY, slow, verdicts
from tests.native import ABORTS, DOES_NOT_COMPILE, NO_OPERATOR, RELU, RELU_OF_ATEN, registering, write

CALLS_ATEN = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor relu(const Tensor& self) {
  StableIValue stack[] = {torch::stable::detail::from(self)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::relu", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
STABLE_TORCH_LIBRARY(any_name, m) { m.def("relu(Tensor self) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(any_name, CPU, m) { m.impl("relu", TORCH_BOX(&relu)); }
"""
ONLY_ONE = RELU.replace('m.def("something_else(Tensor self) -> Tensor");', "").replace(
    "relu_kernel_impl", "the_only_one"
)


def kernels(tmp_path, source, op="relu", ending="cpp"):
    write(tmp_path / "kernels" / op, source, f"{op}_implementation_1.{ending}")
    return tmp_path / "kernels"


@pytest.mark.parametrize("source", [RELU, ONLY_ONE], ids=["by name", "only operator"])
def test_a_right_kernel_passes(source, tmp_path, judge_tiny):
    ended = judge_tiny(
        kernels(tmp_path, source), {"relu.default": UNARY, "relu.out": ["((T([4], f32),), {'out': T([4], f32)})"]}
    )
    assert verdicts(ended) == {"relu.default": {("passed", "")}, "relu.out": {("passed", "")}}
    assert ended.manifest.plan.kernels[0].file.endswith("relu_implementation_1.cpp")


@pytest.mark.parametrize("source", [pytest.param(CALLS_ATEN, id="stable ABI"), slow(RELU_OF_ATEN, id="full headers")])
def test_calling_what_it_replaces_from_native_code_is_cheating(source, tmp_path, judge_tiny):
    ended = judge_tiny(kernels(tmp_path, source), {"relu.default": UNARY})
    reason = "calls aten::relu, the operator that it replaces (--allow-fallback permits it)"
    assert verdicts(ended) == {"relu.default": {("cheated", reason)}}


def test_registering_atens_own_operator_anew_is_tampering(tmp_path, judge_tiny):
    source = RELU + 'STABLE_TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("relu", TORCH_BOX(&relu)); }'
    ended = judge_tiny(kernels(tmp_path, source), {"relu.default": UNARY})
    ((verdict, reason),) = verdicts(ended)["relu.default"]
    assert verdict == "cheated"
    assert "while loading, tampered with its process: re-registered aten::relu" in reason


def test_what_cannot_be_built_or_loaded_is_its_verdict_and_the_run_goes_on(tmp_path, judge_tiny):
    two = (
        registering("STABLE_TORCH_LIBRARY", "one")
        + 'STABLE_TORCH_LIBRARY_FRAGMENT(shared, m) { m.def("two() -> ()"); }'
    )
    for op, source in {"relu": RELU, "abs": DOES_NOT_COMPILE, "neg": NO_OPERATOR, "exp": ABORTS, "sin": two}.items():
        kernels(tmp_path, source, op)
    cases = {f"{op}.default": UNARY for op in ("relu", "abs", "neg", "exp", "sin")}
    found = verdicts(judge_tiny(tmp_path / "kernels", cases))
    assert found.pop("relu.default") == {("passed", "")}
    reasons = {op: reason for op, ((verdict, reason),) in found.items() if verdict == "error"}
    assert reasons["abs.default"].startswith(
        "cannot be built: abs_implementation_1.cpp:2:11: error: 'three' was not declared"
    )
    assert "registers no operator neg_kernel_impl or neg: it registers none" in reasons["neg.default"]
    assert (
        "registers no operator sin_kernel_impl or sin: it registers shared::one, shared::two" in reasons["sin.default"]
    )
    ((verdict, reason),) = found["exp.default"]
    assert verdict == "crashed"
    assert "while loading" in reason
    assert "SIGABRT" in reason


def test_a_source_does_not_get_at_other_files_through_the_compiler(tmp_path, judge_tiny):
    secret = write(tmp_path / "elsewhere", "the_secret_key\n", "key")
    ended = judge_tiny(kernels(tmp_path, f'#include "{secret}"\n'), {"relu.default": UNARY})
    ((verdict, reason),) = verdicts(ended)["relu.default"]
    assert verdict == "error"
    assert "the_secret_key" not in reason
    if not ended.manifest.missing_protections:
        assert "Permission denied" in reason


def test_a_run_is_not_resumed_with_a_changed_source(tmp_path, judge_tiny):
    root = kernels(tmp_path, RELU)
    ended = judge_tiny(root, {"relu.default": UNARY})
    config = RunConfig("tiny", "directory", ops_directory=str(root), timeout_s=5.0)
    assert run(config, ended.store.path, resume=True).summary.exit_code == 0
    write(root / "relu", "#define X 1\n", "beside.h")
    with pytest.raises(RunDirectoryError, match="has changed since the run started"):
        run(config, ended.store.path, resume=True)
