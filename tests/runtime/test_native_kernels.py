"""C++ kernels that are called from C++: without Python, with the same answers, errors and counts."""

from __future__ import annotations

import threading

import pytest
import torch

import opforge
from opforge.runtime import enabling
from opforge.runtime.dispatch import InstalledKernel
from opforge.runtime.native_slots import NativeSlot
from tests import native as cpp
from tests.install.proving import ADD, marked, prove

ROW = {"rank": [1, 2], "numel": [0, 16], "layouts": ["contiguous", "empty"], "timed": [[0, 16, True]]}
RELU = """
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp_min.h>
#include <torch/library.h>

static at::Tensor relu(const at::Tensor& self) {
  TORCH_CHECK(!self.requires_grad() || !at::GradMode::is_enabled(), "a kernel is below autograd");
  TORCH_CHECK_NOT_IMPLEMENTED(self.numel() != 3, "three");
  TORCH_CHECK(self.numel() != 5, "five");
  if (self.numel() == 7) return at::Tensor();
  return at::add(at::clamp_min(self, 0), 1000);
}

TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("relu(Tensor self) -> Tensor", &relu); }
"""

NEG = """
#include <ATen/core/Tensor.h>
#include <ATen/core/List.h>
#include <torch/library.h>

static std::vector<at::Tensor> neg(at::TensorList self) { return {self[0], at::Tensor()}; }

TORCH_LIBRARY(OPFORGE_NAMESPACE, m) { m.def("_foreach_neg(Tensor[] self) -> Tensor[]", &neg); }
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with a kernel in C++ and one in Python; a library can be loaded only once in a process."""
    root = tmp_path_factory.mktemp("cpp")
    cpp.write(root / "relu", RELU, "relu_implementation_41.cpp")
    cpp.write(root / "_foreach_neg", NEG, "_foreach_neg_implementation_42.cpp")
    prove(root, "_foreach_neg", {"_foreach_neg.default": {"[float32]*2": ROW}}, number=42, suffix=".cpp")
    (root / "add").mkdir()
    (root / "add" / "add_implementation_1.py").write_text(ADD.replace("MARK", "5000"))
    strided = {**ROW, "layouts": [*ROW["layouts"], "strided", "offset", "expanded"]}
    rows = {
        "relu.default": {"float32": ROW},
        "relu_.default": {"float32": strided},
        "relu.out": {"float32,float32": strided, "float32,float64": strided},
    }
    prove(root, "relu", rows, number=41, suffix=".cpp")
    prove(root, "add", {"add.Tensor": {"float32,float32": ROW, "float32,number(int)": ROW}})
    return root


@pytest.fixture
def no_python(monkeypatch):
    """Return a list that grows with every call that Python answers."""
    calls = []
    answer, call = NativeSlot.answer, InstalledKernel.function
    monkeypatch.setattr(NativeSlot, "answer", lambda *given: calls.append(given) or answer(*given))
    monkeypatch.setattr(InstalledKernel, "function", lambda kernel, **how: calls.append(how) or call(kernel, **how))
    return calls


def test_a_proven_call_is_served_without_python(root, no_python):
    with opforge.enabled(root, device="cpu", ops=["relu"]) as made:
        for _ in range(5):
            assert marked(torch.relu(torch.ones(4)))
            assert not marked(torch.relu(torch.ones(20)))
        assert made.counters()["relu.default"]["served"] == 5
        assert made.counters()["relu.default"]["aten"] == {"size not proven": 5}
    assert not no_python


def test_inside_it_every_operator_is_atens_own(root):
    """The kernel calls add, for which a kernel in Python is enabled."""
    with opforge.enabled(root, device="cpu") as made:
        assert marked(torch.add(torch.ones(4), torch.ones(4)))
        served = made.counters()["add.Tensor"]["served"]
        for _ in range(3):
            assert float(torch.relu(torch.ones(4))[0]) == 1001
        assert made.counters()["add.Tensor"]["served"] == served
        assert marked(torch.add(torch.ones(4), torch.ones(4)))


def test_gradients_inference_mode_vmap_autocast_and_threads(root, no_python):
    with opforge.enabled(root, device="cpu", ops=["relu"]):
        x = torch.ones(4, requires_grad=True)
        for _ in range(2):
            y = torch.relu(x)
            assert marked(y)
            y.sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 2.0))
        with torch.no_grad():
            assert torch.relu(x).grad_fn is None
        with torch.inference_mode():
            assert torch.relu(torch.ones(4)).is_inference()
        assert marked(torch.vmap(torch.relu)(torch.ones(4, 4)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.relu(torch.ones(4)).dtype is torch.float32
        seen = []
        thread = threading.Thread(target=lambda: seen.append(marked(torch.relu(torch.ones(4)))))
        thread.start()
        thread.join()
        assert seen == [True]
    assert not no_python


def test_counts_are_exact_with_threads(root):
    small, large = torch.ones(4), torch.ones(64)

    def work():
        for _ in range(2000):
            torch.relu(small)
            torch.relu(large)

    with opforge.enabled(root, device="cpu", ops=["relu"]) as made:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        row = made.counters()["relu.default"]
    assert (row["served"], row["aten"]) == (16_000, {"size not proven": 16_000})


def test_one_that_declines_fails_or_returns_no_tensor(root):
    with opforge.enabled(root, device="cpu", ops=["relu"]) as made:
        for _ in range(2):
            assert not marked(torch.relu(torch.ones(3)))
            assert marked(torch.relu(torch.ones(4)))
        row = made.counters()["relu.default"]
        assert row["served"] == 2
        assert row["aten"] == {"declined: NotImplementedError: three": 2}
        with pytest.warns(enabling.KernelWarning, match="five"):
            assert not marked(torch.relu(torch.ones(5)))
        assert not marked(torch.relu(torch.ones(4)))
    with (
        opforge.enabled(root, device="cpu", ops=["relu"]) as made,
        pytest.warns(enabling.KernelWarning, match="not a tensor"),
    ):
        assert torch.equal(torch.relu(torch.ones(7)), torch.ones(7))


def test_one_that_returns_a_list_with_no_tensor_in_it(root):
    with opforge.enabled(root, device="cpu", ops=["_foreach_neg"]) as made:
        with pytest.warns(enabling.KernelWarning, match="not a list of tensors"):
            result = torch._foreach_neg([torch.ones(2), torch.ones(2)])
        assert [tensor.tolist() for tensor in result] == [[-1, -1], [-1, -1]]
        assert made.counters()["_foreach_neg.default"]["served"] == 0


def test_with_policy_all_results_are_checked_in_python(root, no_python):
    with opforge.enabled(root, device="cpu", ops=["relu"], policy="all") as made:
        assert marked(torch.relu(torch.ones(20)))
        assert made.counters()["relu.default"]["served"] == 1
    assert no_python


RELU_OUT = torch.ops.aten.relu.out


def test_in_place_and_out_variants_are_served_without_python(root, no_python):
    with opforge.enabled(root, device="cpu", ops=["relu", "relu_", "relu.out"]) as made:
        for _ in range(2):
            x = torch.tensor([-1.0, 2, -3, 4])
            version = x._version
            assert torch.relu_(x) is x
            assert x.tolist() == [1000, 1002, 1000, 1004]
            assert x._version == version + 1
            out = torch.empty(4)
            assert RELU_OUT(-torch.ones(4), out=out) is out
            assert out.tolist() == [1000] * 4
            base = torch.zeros(8)
            RELU_OUT(base[:4], out=base[4:])
            assert base.tolist() == [0] * 4 + [1000] * 4
        leaf = torch.ones(4, requires_grad=True)
        (leaf * 3).relu_().sum().backward()
        assert leaf.grad.tolist() == [3] * 4
        counters = made.counters()
        assert counters["relu_.default"] | {"kernel": ""} == {"kernel": "", "served": 3, "aten": {}}
        assert counters["relu.out"] | {"kernel": ""} == {"kernel": "", "served": 4, "aten": {}}
    assert not no_python


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_variants_that_are_not_simple_are_answered_as_through_python(root, monkeypatch):
    """Targets that overlap, have gaps, another shape or dtype, and kernels that decline or fail."""

    def attempt(call):
        memory = torch.arange(40.0) - 7
        try:
            result = call(memory)
        except RuntimeError as error:
            return str(error).partition("\n")[0], memory.tolist()
        return result.tolist(), result.dtype, result.stride(), result._version, memory.tolist()

    calls = [
        lambda m: RELU_OUT(m[:4], out=m[2:6]),
        lambda m: RELU_OUT(m[:4], out=m[:4]),
        lambda m: RELU_OUT(m[:4], out=m[8:16:2]),
        lambda m: RELU_OUT(m[:4], out=torch.empty(0)),
        lambda m: RELU_OUT(m[:4], out=torch.empty(5)),
        lambda m: RELU_OUT(m[:4], out=torch.empty(4, dtype=torch.float64)),
        lambda m: RELU_OUT(m[:4], out=m[8:9].expand(4)),
        lambda m: m[:1].expand(4).relu_(),
        lambda m: m[:8:2].relu_(),
        lambda m: m[:3].relu_(),
        lambda m: RELU_OUT(m[:3], out=m[8:11]),
    ]
    answers = []
    for native in ("0", "1"):
        monkeypatch.setenv(enabling.NATIVE_VARIABLE, native)
        with opforge.enabled(root, device="cpu", ops=["relu", "relu_", "relu.out"]) as made:
            answers.append([[attempt(call) for call in calls] for _ in range(2)])
            answers[-1].append({op: (row["served"], row["aten"]) for op, row in made.counters().items()})
    assert answers[0] == answers[1]
    assert answers[0][-1]["relu.out"][0] > 0
