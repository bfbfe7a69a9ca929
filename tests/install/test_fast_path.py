"""What was found out about a call is remembered by its geometry: for calls like it, and for no others."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import opforge
from opforge.runtime import enabling, fast_path
from opforge.runtime.dispatch import CallCounts
from tests.install.proving import ADD, RELU, marked, prove


@pytest.fixture(autouse=True, params=["native", "Python"])
def path(request, monkeypatch):
    """Have calls decided in C++, and by the fast path in Python."""
    monkeypatch.setenv(enabling.NATIVE_VARIABLE, str(int(request.param == "native")))
    return request.param


EVERYWHERE = {"rank": [1, 2], "numel": [1, 16], "layouts": ["contiguous", "offset"], "timed": [[1, 16, True]]}


@pytest.mark.parametrize(
    ("other", "inside"),
    [
        (lambda: torch.ones(4, 4), True),
        (lambda: torch.ones(20)[4:].view(4, 4), True),
        (lambda: torch.ones(2, 8), True),
        (lambda: torch.ones(16), True),
        (lambda: torch.ones(2), True),
        (lambda: torch.ones(4, 4).t(), False),
        (lambda: torch.ones(4, 8)[:, ::2], False),
        (lambda: torch.ones(4, 1).expand(4, 4), False),
        (lambda: torch.ones(2, 2, 4), False),
        (lambda: torch.ones(4, 5), False),
        (lambda: torch.ones(4, 4, dtype=torch.float64), False),
        (lambda: torch.ones(4, 4, dtype=torch.int64), False),
        (lambda: torch.ones(4, 4, requires_grad=True), True),
        (lambda: torch.nn.Parameter(torch.ones(4, 4)), True),
    ],
)
@pytest.mark.parametrize("op", ["relu", "add"])
def test_a_call_that_is_remembered_makes_no_other_one_inside(kernels, op, other, inside):
    root = kernels({"relu": RELU, "add": ADD})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    prove(root, "add", {"add.Tensor": {"float32,float32": EVERYWHERE}})
    call = {"relu": torch.relu, "add": lambda x: torch.add(torch.ones(x.shape), x)}[op]
    given = other()
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert marked(call(torch.ones(4, 4)))
        for _ in range(3):
            assert marked(call(given)) is inside
            assert marked(call(torch.ones(4, 4)))
        counters = made.counters()
    served = sum(row["served"] for row in counters.values())
    assert served == 6 + 3 * inside
    assert sum(sum(row["aten"].values()) for row in counters.values()) == 9 - served


@pytest.mark.parametrize("layouts", [["contiguous"], ["contiguous", "offset"]])
def test_where_a_tensor_begins_is_looked_at_unless_it_is_proven(kernels, layouts):
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": {**EVERYWHERE, "layouts": layouts}}})
    begins, shifted = torch.ones(4, 4), torch.ones(20)[4:].view(4, 4)
    with opforge.enabled(root, device="cpu"):
        for _ in range(2):
            assert marked(torch.relu(begins))
            assert marked(torch.relu(shifted)) is ("offset" in layouts)


def test_the_same_tensor_twice_a_number_and_a_scalar_are_answered_like_others(kernels):
    root = kernels({"add": ADD})
    arguments = {"alpha": {"default": [], "int": [2, 3]}}
    prove(root, "add", {"add.Tensor": {"float32,float32": {**EVERYWHERE, "arguments": arguments}}})
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    with opforge.enabled(root, device="cpu"):
        for _ in range(3):
            assert marked(torch.add(x, y))
            assert marked(torch.add(x, x))
            assert marked(torch.add(x, y, alpha=2))
            assert not marked(torch.add(x, 2.0))
            assert not marked(torch.add(x, torch.tensor(2.0)))  # no dimensions


def test_remembered_calls_in_modes_and_threads(kernels):
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    x, seen = torch.ones(4, 4), []
    with opforge.enabled(root, device="cpu"):
        for _ in range(2):
            assert marked(torch.relu(x))
            with torch.inference_mode():
                assert marked(torch.relu(x))
                assert marked(torch.relu(torch.ones(4, 4)))
            assert marked(torch.vmap(torch.relu)(x))
            thread = threading.Thread(target=lambda: seen.append(marked(torch.relu(torch.ones(4, 4)))))
            thread.start()
            thread.join()
    assert seen == [True, True]
    assert not marked(torch.relu(x))


@pytest.mark.parametrize("layouts", [["contiguous"], ["contiguous", "offset"]])
def test_calls_that_are_passed_on_are_remembered_with_the_reason(kernels, layouts):
    root = kernels({"add": ADD})
    prove(root, "add", {"add.Tensor": {"float32,float32": {**EVERYWHERE, "layouts": layouts}}})
    small, large, shifted = torch.ones(4, 4), torch.ones(5, 5), torch.ones(20)[4:].view(4, 4)
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert torch.equal(torch.add(large, large.clone()), large * 2)
            assert torch.equal(torch.add(large, large.clone(), alpha=2), large * 3)
            assert torch.equal(torch.add(large, large), large * 2)
            assert torch.equal(torch.add(large, 3), large * 4)
            assert torch.equal(torch.add(large, 0.5), large * 1.5)
            assert marked(torch.add(small, small.clone()))
            assert marked(torch.add(small, shifted)) is ("offset" in layouts)
        counts = made.counters()["add.Tensor"]
    outside = {} if "offset" in layouts else {"layout not proven": 3}
    assert counts["aten"] == {"size not proven": 9, "dtypes not proven": 6, **outside}
    assert counts["served"] == 6 - sum(outside.values())


def test_what_is_remembered_is_not_asked_for_again(kernels, monkeypatch, path):
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    asked = []
    ask = fast_path.DecisionCache._learn
    monkeypatch.setattr(fast_path.DecisionCache, "_learn", lambda *given: asked.append(given) or ask(*given))
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(5):
            for size in (4, 16, 17, 64):
                torch.relu(torch.ones(size))
        counts = made.counters()["relu.default"]
    assert (counts["served"], counts["aten"]) == (10, {"size not proven": 10})
    assert len(asked) == (4 if path == "Python" else 0)


def test_aten_answers_under_autocast_when_a_kernel_has_declined(kernels):
    """The kernel is below autocast. ATen's own code calls matmul, to which autocast applies."""
    root = kernels({"_cdist_forward": "def _cdist_forward_kernel_impl(*_):\n    raise NotImplementedError('no')\n"})
    row = {**EVERYWHERE, "arguments": {"p": {"float": [2, 2]}, "compute_mode": {"int": [1, 1]}}}
    prove(root, "_cdist_forward", {"_cdist_forward.default": {"float32,float32": row}})
    x = torch.ones(4, 4)

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.ops.aten._cdist_forward.default(x, x, 2.0, 1).dtype

    expected = call()
    with opforge.enabled(root, device="cpu") as made:
        assert [call(), call()] == [expected] * 2
        counts = made.counters()["_cdist_forward.default"]
    assert (counts["served"], counts["aten"]) == (0, {"declined: NotImplementedError: no": 2})


def test_a_thread_that_counts_in_the_middle_of_another_ones_first_count_is_counted():
    """Threads switch where a function in Python begins, so no such function may be part of a count."""
    counts, switches = CallCounts(kernel=None), []

    def count_too(_frame, event, _argument):
        if event == "call":
            switches.append(event)
            counts.aten["size"] += 1

    def count_in_profile():
        sys.setprofile(count_too)
        counts.aten["size"] += 1
        sys.setprofile(None)

    thread = threading.Thread(target=count_in_profile)
    thread.start()
    thread.join()
    assert counts.aten == {"size": 1 + len(switches)}


def test_with_more_geometries_than_are_cached_all_is_answered_as_before(kernels, monkeypatch):
    monkeypatch.setattr(fast_path, "MAX_GEOMETRIES", 3)
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    with opforge.enabled(root, device="cpu") as made:
        memory = made._kernels["relu.default"].decisions
        for _ in range(2):
            for size in range(10, 23):
                assert marked(torch.relu(torch.ones(size))) is (size <= 16)
                assert sum(map(len, memory._learnt.values())) <= 3
        assert made.counters()["relu.default"]["served"] == 14


def test_parameters_are_served_with_gradients_and_without_and_written_to(kernels):
    written = (
        "import torch\ndef add__kernel_impl(self, other, *, alpha=1):\n    return self.sub_(other, alpha=-alpha)\n"
    )
    wary = "def relu_kernel_impl(self):\n    assert not self.requires_grad\n    return self.clamp(min=0)\n"
    root = kernels({"relu": wary, "add_": written})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    prove(root, "add_", {"add_.Tensor": {"float32,float32": EVERYWHERE}})
    weight, step = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    with opforge.enabled(root, device="cpu") as made:
        for turn in range(1, 4):
            torch.relu(weight).sum().backward()
            assert torch.equal(weight.grad, torch.full((4, 4), float(turn)))
            with torch.no_grad():
                assert weight.add_(step) is weight
        assert torch.equal(weight, torch.full((4, 4), 4.0))
        counts = made.counters()
    assert counts["relu.default"] == {"kernel": "relu_implementation_1", "served": 3, "aten": {}}
    assert counts["add_.Tensor"] == {
        "kernel": "add__implementation_1",
        "served": 5,
        "aten": {},
    }  # 2 were autograd's own


NORM = """
import torch
def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    mean = input.mean(-1, keepdim=True)
    rstd = torch.rsqrt(input.var(-1, correction=0, keepdim=True) + eps)
    return (input - mean) * rstd * weight + bias, RESULTS
"""


@pytest.mark.parametrize("broken", [False, True])
def test_operators_with_several_results_and_tensors_that_may_be_missing(kernels, broken):
    root = kernels({"native_layer_norm": NORM.replace("RESULTS", "mean" if broken else "mean, rstd")})
    layouts = [*EVERYWHERE["layouts"], "shapes differ"]
    arguments = {"normalized_shape": {"[int]*1": [4, 4]}, "eps": {"float": [1e-5, 1e-5]}}
    proven = {**EVERYWHERE, "numel": [1, 64], "layouts": layouts, "timed": [[1, 64, True]], "arguments": arguments}
    prove(root, "native_layer_norm", {"native_layer_norm.default": {"float32,float32,float32": proven}})
    x, weight, bias = torch.randn(8, 4), torch.randn(4), torch.randn(4)
    norm = torch.nn.functional.layer_norm
    given = [(x, (4,), weight, bias), (x, (4,)), (x, (4,), weight), (x.double(), (4,), weight.double(), bias.double())]
    expected = [norm(*g) for g in given]
    with opforge.enabled(root, device="cpu") as made:
        for turn in range(3):
            if broken and not turn:
                with pytest.warns(RuntimeWarning, match="not 3 results"):
                    torch.testing.assert_close(norm(*given[0]), expected[0])
            for one, wanted in zip(given, expected, strict=True):
                torch.testing.assert_close(norm(*one), wanted)
        counts = made.counters()["native_layer_norm.default"]
    assert counts["served"] == (0 if broken else 3)
    assert counts["aten"].get("dtypes not proven", 0) == (0 if broken else 9)


def test_where_the_first_kernel_remembers_that_a_call_is_outside_the_second_is_asked(kernels):
    first, second = kernels({"relu": RELU}, folder="first"), kernels({"relu": RELU}, mark=5000, folder="second")
    for root, most in ((first, 16), (second, 100)):
        proven = {**EVERYWHERE, "numel": [1, most], "timed": [[1, most, True]]}
        prove(root, "relu", {"relu.default": {"float32": proven}})
    with opforge.enabled(second, device="cpu") as below, opforge.enabled(first, device="cpu") as above:
        for _ in range(3):
            assert torch.relu(torch.ones(4)).max() == 1001
            assert torch.relu(torch.ones(50)).max() == 5001
            assert torch.relu(torch.ones(200)).max() == 1
        counts = [made.counters()["relu.default"] for made in (above, below)]
    assert [(c["served"], sum(c["aten"].values())) for c in counts] == [(3, 6), (3, 3)]


def test_without_guards_every_call_goes_the_long_way(kernels, monkeypatch):
    monkeypatch.setattr("opforge.runtime.dispatch.HAS_GUARDS", False)
    root = kernels({"relu": RELU})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    with opforge.enabled(root, device="cpu") as made:
        assert [marked(torch.relu(torch.ones(n))) for n in (4, 4, 17, 17)] == [True, True, False, False]
        assert made.counters()["relu.default"]["aten"] == {"size not proven": 2}
