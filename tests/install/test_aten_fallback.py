"""Calls that are not for a kernel, and kernels that raise: ATen's answer is what it is without us, and blame goes where it belongs."""

from __future__ import annotations

import warnings

import pytest
import torch

import opforge
from opforge.runtime.dispatch import KernelWarning
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.proven_calls import ProvenCalls
from tests.install.proving import ADD, RELU, marked, outcome, prove

EVERYWHERE = {"rank": [0, 4], "numel": [0, 64], "layouts": ["contiguous", "offset"], "timed": [[0, 64, True]]}
ABS = "import torch\ndef abs_kernel_impl(self):\n    return torch.where(self > 0, self, -self) + MARK\n"
COUNT = "def bincount_kernel_impl(self, weights=None, minlength=0):\n    raise NotImplementedError\n"


@pytest.mark.parametrize("policy", ["proven", "right", "all"])
def test_forms_that_write_to_a_tensor_given_by_name(kernels, policy):
    root = kernels({"abs": ABS})
    both = {"float32,float32": EVERYWHERE}
    prove(
        root, "abs", {"abs.default": {"float32": EVERYWHERE}, "abs.out": both, "abs_.default": {"float32": EVERYWHERE}}
    )
    with opforge.enabled(root, device="cpu", policy=policy) as made:
        for _ in range(2):
            out = torch.empty(4)
            assert torch.abs(-torch.ones(4), out=out) is out
            assert marked(out)
            assert marked((-torch.ones(4)).abs_())
            assert marked(torch.abs(torch.ones(100))) is (policy == "all")  # else ATen's own, which calls abs.out
        assert made.counters()["abs.out"]["served"] == 2


def test_an_operator_whose_second_tensor_may_be_left_out(kernels):
    with opforge.enabled(kernels({"bincount": COUNT}), device="cpu", policy="all"):
        x, weights = torch.tensor([0, 2, 2]), torch.tensor([1.0, 2.0, 3.0])
        assert torch.bincount(x).tolist() == [1, 0, 2]
        assert torch.bincount(x, weights).tolist() == [1, 0, 5]


F16, BF16, I32, U8 = torch.float16, torch.bfloat16, torch.int32, torch.uint8
NUMBERS = {
    "copysign 0.0": (torch.copysign, torch.tensor([1.0, 2.0], dtype=torch.float64), 0.0),
    "copysign -0.0": (torch.copysign, torch.tensor([1.0, 2.0], dtype=torch.float64), -0.0),
    "div -0.0": (torch.div, torch.tensor([1.0, 2.0], dtype=torch.float64), -0.0),
    "large beside f16": (torch.mul, torch.tensor([1e-3, 3.0], dtype=F16), 1e6),
    "bf16": (torch.mul, torch.linspace(-5, 5, 64, dtype=BF16), 0.1),
    "u8 wraps": (torch.add, torch.tensor([1, 2], dtype=U8), 300),
    "u8 wraps, no dimensions": (torch.add, torch.tensor(1, dtype=U8), 300),
    "i32 wraps": (torch.add, torch.tensor([1, 2], dtype=I32), 2**40),
    "i32 and a float": (torch.add, torch.tensor([1, 2], dtype=I32), 2.5),
    "i32 and a float, no dimensions": (torch.add, torch.tensor(1, dtype=I32), 2.5),
    "i32 and a complex one": (torch.mul, torch.tensor([1, 2], dtype=I32), 2.5j),
    "f64, no dimensions": (torch.mul, torch.tensor(3.0, dtype=torch.float64), 0.1),
    "bool": (torch.add, torch.tensor([True, False]), True),
    "two numbers": (torch.add, 1.5, 2),
    "two numbers, complex": (torch.mul, 1j, 2),
    "a zero's sign in a complex number": (torch.mul, torch.tensor([complex(3, -0.0)]), complex(1, -0.0)),
    "more than a signed number holds": (torch.add, torch.tensor([1], dtype=torch.uint64), 2**63 + 1),
    "bool and an int": (torch.add, torch.tensor([True, False]), 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_mean_what_they_mean_to_aten(kernels, name):
    call, tensor, number = NUMBERS[name]
    declining = "def OP_kernel_impl(self, other, **kwargs):\n    raise NotImplementedError\n"
    ops = ("copysign", "div", "mul", "add")
    root = kernels({op: declining.replace("OP", op) for op in ops})
    expected = outcome(lambda: call(tensor, number))
    with opforge.enabled(root, device="cpu", policy="all") as made:
        if isinstance(number, complex):
            call(tensor, number.conjugate())  # which is equal to it where its imaginary part is a zero
        for _ in range(2):
            assert outcome(lambda: call(tensor, number)) == expected
        assert any(row["aten"] for row in made.counters().values())


def test_a_number_follows_the_default_dtype(kernels):
    root = kernels({"add": ADD})
    prove(root, "add", {"add.Tensor": {"float32,float32": EVERYWHERE}})
    with opforge.enabled(root, device="cpu"):
        assert torch.add(torch.tensor([1, 2]), 2.5).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.add(torch.tensor([1, 2]), 2.5).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_number_alone_where_a_tensor_is_wanted(kernels):
    source = "def _to_copy_kernel_impl(self, **kwargs):\n    raise NotImplementedError\n"
    with opforge.enabled(kernels({"_to_copy": source}), device="cpu", policy="all"):
        assert torch.add(torch.tensor([1, 2]), 2.5).tolist() == [3.5, 4.5]
        assert repr(torch.tensor([1.5])) == "tensor([1.5000])"


def test_whether_gradients_are_recorded_is_seen_at_each_call(kernels):
    wary = """
import torch
def relu_kernel_impl(self):
    assert not (self.requires_grad and torch.is_grad_enabled())
    return self.clamp(min=0)
"""
    root = kernels({"relu": wary})
    prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(2):
            with torch.no_grad():
                torch.relu(weight)
            torch.relu(weight).sum().backward()
        assert made.counters()["relu.default"] == {"kernel": "relu_implementation_1", "served": 4, "aten": {}}
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0))


def test_conjugates_and_several_devices_are_not_inside():
    extents = [[[1, 2], [2, 2]]] * 2
    row = {**EVERYWHERE, "extents": extents, "layouts": ["contiguous", "transposed", "offset", "shapes differ"]}
    mm = ProvenCalls(schema_of("mm.default"), {"complex64,complex64": row}, check_speed=True)
    x = torch.ones(2, 2, dtype=torch.complex64)
    assert mm.why_not((x, x), {}) == ""
    assert mm.why_not((x, x.conj()), {}) == "layout not proven"
    add = ProvenCalls(schema_of("add.Tensor"), {"float32,float32": row}, check_speed=True)
    assert add.why_not((torch.ones(2), torch.ones(())), {}) == ""
    assert add.why_not((torch.ones(2), torch.ones((), device="meta")), {}) == "more than one device"


WRITES = """
import opforge
def add__kernel_impl(self, other, *, alpha=1):
    self.sub_(other, alpha=-alpha)
    opforge.disable()
    raise RuntimeError("broken after writing")
"""


def test_a_call_that_may_have_written_is_lost_though_the_kernel_is_gone_by_then(kernels):
    root = kernels({"add_": WRITES})
    prove(root, "add_", {"add_.Tensor": {"float32,float32": EVERYWHERE}})
    x = torch.zeros(4)
    opforge.enable(root, device="cpu")
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="broken after writing"):
        warnings.simplefilter("ignore")
        x.add_(torch.ones(4))
    assert x.tolist() == [1.0] * 4


def test_a_callers_mistake_does_not_cost_a_kernel_that_writes_its_place(kernels):
    source = "def add__kernel_impl(self, other, *, alpha=1):\n    return self.sub_(other, alpha=-alpha)\n"
    root = kernels({"add_": source})
    with opforge.enabled(root, device="cpu", policy="all") as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.ones(4).add_(torch.ones(3))
            assert torch.ones(4).add_(torch.ones(4)).tolist() == [2.0] * 4
        counts = made.counters()["add_.Tensor"]
    assert counts["served"] == 2
    assert sum(counts["aten"].values()) == 2


SECOND = """
import opforge
def relu_kernel_impl(self):
    opforge.enable({root!r}, device="cpu")
    raise RuntimeError("the first is broken")
"""


def test_an_error_of_one_kernel_is_not_blamed_on_one_installed_meanwhile(kernels):
    second = kernels({"relu": RELU}, mark=5000, folder="second")
    first = kernels({"relu": SECOND.format(root=str(second))}, folder="first")
    for root in (first, second):
        prove(root, "relu", {"relu.default": {"float32": EVERYWHERE}})
    made = opforge.enable(first, device="cpu")
    with pytest.warns(KernelWarning, match="the first is broken.*handles calls from now on"):
        assert torch.relu(torch.ones(4)).max() == 5001
    assert list(made.counters()["relu.default"]["aten"]) == ["raised RuntimeError: the first is broken"]
    for _ in range(2):
        assert torch.relu(torch.ones(4)).max() == 5001
    assert sum(made.counters()["relu.default"]["aten"].values()) == 1


def test_a_broken_kernel_before_one_that_serves_is_taken_out(kernels):
    first = kernels({"relu": "def relu_kernel_impl(self):\n    raise ValueError('broken')\n"}, folder="first")
    second = kernels({"relu": RELU}, folder="second")
    with (
        opforge.enabled(second, device="cpu", policy="all"),
        opforge.enabled(first, device="cpu", policy="all") as made,
    ):
        with pytest.warns(KernelWarning, match="broken.*relu_implementation_1 handles calls from now on"):
            assert marked(torch.relu(torch.ones(4)))
        for _ in range(4):
            assert marked(torch.relu(torch.ones(4)))
        assert made.counters()["relu.default"]["aten"] == {"raised ValueError: broken": 1}
