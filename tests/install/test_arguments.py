"""Arguments that are no tensors: a kernel is asked for those values that its proof has, and for no others."""

from __future__ import annotations

import pytest
import torch

import opforge
from opforge.runtime.enabling import NATIVE_VARIABLE
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.proven_calls import ProvenCalls
from opforge.runtime.value_ranges import dtype_signature
from tests.install.proving import ADD, marked, prove

ANY_EXTENTS = [[[0, 1000]] * 3]
ROW = {"rank": [0, 3], "numel": [0, 1000], "layouts": ["contiguous", "offset"], "timed": [[0, 1000, True]]}
PLAIN_GELU = "import torch\ndef gelu_kernel_impl(self, *, approximate='none'):\n    return self + 900\n"
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def served(op, arguments, *args, **kwargs):
    """Return why a call with a float32 tensor first is not served by a proof with these arguments; nothing where it is."""
    return ProvenCalls(
        schema_of(op), {"float32": {**ROW, "extents": ANY_EXTENTS, "arguments": arguments}}, check_speed=True
    ).why_not((X, *args), kwargs)


def test_a_word_that_no_case_had_is_for_aten(kernels):
    root = kernels({"gelu": PLAIN_GELU})
    prove(root, "gelu", {"gelu.default": {"float32": ROW}})
    gelu = torch.nn.functional.gelu
    expected = gelu(X, approximate="tanh")
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert marked(gelu(X))
            assert torch.equal(gelu(X, approximate="tanh"), expected)
            assert marked(gelu(X, approximate="none"))
        assert made.counters()["gelu.default"] == {
            "kernel": "gelu_implementation_1",
            "served": 6,
            "aten": {"approximate not proven for this value": 3},
        }
    prove(root, "gelu", {"gelu.default": {"float32": {**ROW, "arguments": {"approximate": {"'tanh'": []}}}}})
    with opforge.enabled(root, device="cpu"):
        for _ in range(3):
            assert not marked(gelu(X))
            assert marked(gelu(X, approximate="tanh"))


@pytest.mark.parametrize(
    ("op", "arguments", "call", "inside"),
    [
        ("_softmax.default", {"dim": {"int": [-1, 1]}, "half_to_float": {"False": []}}, (0, False), True),
        ("_softmax.default", {"dim": {"int": [-1, 1]}, "half_to_float": {"False": []}}, (2, False), False),
        ("_softmax.default", {"dim": {"int": [-1, 1]}, "half_to_float": {"False": []}}, (1, True), False),
        ("_softmax.default", {"half_to_float": {"False": []}}, (1, False), False),
        ("sum.dim_IntList", {"dim": {"[int]*1": [0, 1]}}, ([1],), True),
        ("sum.dim_IntList", {"dim": {"[int]*1": [0, 1]}}, ([0, 1],), False),
        ("sum.dim_IntList", {"dim": {"[int]*1": [0, 1]}}, ([1], True), False),
        ("sum.dim_IntList", {"dim": {"None": []}}, (None,), True),
        ("sum.dim_IntList", {"dim": {"None": []}, "keepdim": {"True": []}}, (None,), False),
        ("leaky_relu.default", {}, (), True),
        ("leaky_relu.default", {}, (0.01,), True),
        ("leaky_relu.default", {}, (0.2,), False),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.2]}}, (0.2,), True),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.2]}}, (0.3,), False),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.2]}}, (), False),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.5]}}, (7.5,), True),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.2], "default": []}}, (7.5,), True),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.5]}}, (float("nan"),), False),
        ("leaky_relu.default", {"negative_slope": {"nan": []}}, (float("nan"),), True),
        ("leaky_relu.default", {"negative_slope": {"float": [0.2, 0.5]}}, (1,), False),
        ("leaky_relu.default", {"negative_slope": {"float": [0.01, 0.01], "default": []}}, (7.5,), False),
        ("leaky_relu.default", {"negative_slope": {"float": [0.0, 0.0]}}, (-0.0,), False),
        ("leaky_relu.default", {"negative_slope": {"-0.0": []}}, (-0.0,), True),
        ("uniform.default", {}, (0.0,), True),
        ("uniform.default", {}, (-0.0,), False),
        ("elu.default", {}, (1,), True),
        ("elu.default", {}, (1.0,), False),
        ("leaky_relu.default", {"negative_slope": {"float": []}}, (0.2,), False),
        ("clamp.default", {"min": {"float": [0.5, 0.5], "default": []}}, (-3.25,), False),
        ("pow.Tensor_Scalar", {"exponent": {"int": [2, 3]}}, (3,), True),
        ("pow.Tensor_Scalar", {"exponent": {"int": [2, 3]}}, (4,), False),
        ("pow.Tensor_Scalar", {"exponent": {"int": [0, 3]}}, (True,), False),
        ("clamp.default", {"min": {"int": [0, 0]}}, (0,), True),
        ("clamp.default", {"min": {"int": [0, 0]}}, (0, 1), False),
        ("_to_copy.default", {"dtype": {"bfloat16": []}}, {"dtype": torch.bfloat16}, True),
        ("_to_copy.default", {"dtype": {"bfloat16": []}}, {"dtype": torch.float16}, False),
        ("_to_copy.default", {"dtype": {"bfloat16": []}}, {"dtype": torch.bfloat16, "device": torch.device("cpu")}, True),
        ("_softmax.default", {"half_to_float": {"False": []}}, (None, False), False),
        ("bernoulli.default", {}, {"generator": None}, True),
        ("bernoulli.default", {}, {"generator": torch.Generator()}, False),
        ("clone.default", {"memory_format": {"channels_last": []}}, {"memory_format": torch.channels_last}, True),
        ("clone.default", {}, {"memory_format": torch.channels_last}, False),
        ("clone.default", {}, {"memory_format": None}, True),
    ],
)  # fmt: skip
def test_which_values_are_inside(op, arguments, call, inside):
    reason = served(op, arguments, **call) if isinstance(call, dict) else served(op, arguments, *call)
    assert (reason == "") is inside, reason
    assert inside or reason.endswith(" not proven for this value")


def test_a_signature_has_the_dtypes_of_tensors_and_the_kinds_of_numbers():
    given = [torch.ones(1), None, [torch.ones(1), torch.ones(1, dtype=torch.int8)], 2, []]
    assert dtype_signature(given, str) == ("torch.float32,,[torch.float32 torch.int8]*2,number(int),[]")


def test_whole_numbers_among_others_in_a_list_have_bounds():
    arguments = {"scalars": {"[int float]*2": [1, 2.5]}}
    proven_calls = ProvenCalls(
        schema_of("_foreach_add.ScalarList"),
        {"[float32]*2": {**ROW, "extents": ANY_EXTENTS, "arguments": arguments}},
        check_speed=True,
    )
    assert proven_calls.why_not(([X, X], [1, 2.5]), {}) == ""
    assert proven_calls.why_not(([X, X], [10**9, 2.5]), {}) == "scalars not proven for this value"


def test_a_result_on_another_device_is_for_aten(kernels):
    root = kernels({"zeros_like": "import torch\ndef zeros_like_kernel_impl(self, **options):\n    return self * 0\n"})
    arguments = {"pin_memory": {"False": []}}
    prove(root, "zeros_like", {"zeros_like.default": {"float32": {**ROW, "arguments": arguments}}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(2):
            assert torch.zeros_like(X).device.type == torch.zeros_like(X, device="cpu").device.type == "cpu"
            assert torch.zeros_like(X, device="meta").device.type == "meta"
        assert made.counters()["zeros_like.default"]["served"] == 4
        assert made.counters()["zeros_like.default"]["aten"] == {"more than one device": 2}


POW = """
import torch
def pow_kernel_impl(self, exponent):
    return self * 0 + 900 + exponent
"""


def test_numbers_that_are_equal_are_told_apart_by_kind_in_calls_that_are_remembered(kernels):
    root = kernels({"pow": POW})
    prove(root, "pow", {"pow.Tensor_Scalar": {"float32": {**ROW, "arguments": {"exponent": {"int": [0, 3]}}}}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            for exponent in (1, 1.0, True, 2, 3.0, 3):
                expected = type(exponent) is int
                assert marked(torch.ops.aten.pow.Tensor_Scalar(X, exponent)) is expected, exponent
        assert made.counters()["pow.Tensor_Scalar"]["served"] == 9


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (-0.0, 0.0), (1 + 0j, 1 - 0j), (1 - 0j, 1 + 0j)])
def test_zeros_of_another_sign_are_told_apart_in_calls_that_are_remembered(kernels, numbers):
    root = kernels({"add": ADD.replace("MARK", "900")})
    x = X.to(torch.complex64)
    words = {str(numbers[0]): []} if str(numbers[0]) != "0.0" else {"float": [0.0, 0.0]}
    prove(root, "add", {"add.Tensor": {"complex64,complex64": {**ROW, "arguments": {"alpha": words}}}})
    with opforge.enabled(root, device="cpu"):
        for _ in range(2):
            for turn in (numbers, numbers[::-1]):
                assert [marked(torch.add(x, x, alpha=n).real) for n in turn] == [n is numbers[0] for n in turn]


def test_numbers_that_are_always_new_are_remembered_by_none(kernels, monkeypatch):
    monkeypatch.setenv(NATIVE_VARIABLE, "0")
    root = kernels({"add": ADD.replace("MARK", "900")})
    row = {**ROW, "arguments": {"alpha": {"float": [0.5, 2.5]}}}
    prove(root, "add", {"add.Tensor": {"float32,float32": row}})
    with opforge.enabled(root, device="cpu") as made:
        for number in range(600):  # more than are remembered
            assert marked(torch.add(X, X, alpha=number + 0.25))
            assert not marked(torch.add(X, X, alpha=number))
        counts = made.counters()["add.Tensor"]
        assert sum(map(len, made._kernels["add.Tensor"].decisions._learnt.values())) == 1
    assert (counts["served"], counts["aten"]) == (600, {"alpha not proven for this value": 600})


ROLL = """
import torch
def roll_kernel_impl(self, shifts, dims=()):
    shifts.append(0)  # what it is given is its own
    return self + 900
"""


def test_lists_are_compared_as_they_were_given(kernels):
    root = kernels({"roll": ROLL})
    prove(root, "roll", {"roll.default": {"float32": {**ROW, "arguments": {"shifts": {"[int]*1": [1, 2]}}}}})
    with opforge.enabled(root, device="cpu") as made:
        for _ in range(3):
            assert marked(torch.roll(X, 1))
            assert marked(torch.roll(X, 2))
            assert not marked(torch.roll(X, 3))
            assert not marked(torch.roll(X, 1, 0))
            assert not marked(torch.roll(X, (1, 2), (0, 1)))
        counts = made.counters()["roll.default"]
    assert counts["served"] == 6
    assert {*counts["aten"]} == {"shifts not proven for this value", "dims not proven for this value"}
