"""Arguments that are numbers: calls are decided by the limits of what is proven, and plans are for one value."""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import pytest
import torch

import opforge
from opforge.runtime.operator_schema import schema_of
from opforge.runtime.proven_calls import ProvenCalls
from opforge.runtime.value_ranges import is_in_ranges, number_limits, value_kind
from tests.install.proving import ADD, prove, with_extents
from tests.runtime.test_launch_plans import enabled, gpu, libcuda, same_bits  # noqa: F401

ROW = {"rank": [1, 2], "numel": [1, 16], "layouts": ["contiguous"], "timed": [[1, 16, True]]}
KNOWN = [
    {}, {"default": []}, {"int": [2, 5]}, {"default": [], "int": [-3, -3]}, {"float": [0.5, 0.5]}, {"float": [0.5, 2.5]},
    {"default": [], "float": [1.0, 1.0]}, {"default": [], "float": [2.0, 2.0]}, {"inf": [], "True": []},
    {"int": [-(2**63), 2**63 - 1]}, {"float": [0.0, 0.0], "int": [0, 0], "-0.0": []}, {"float": [-1e308, -1e308]},
]  # fmt: skip
NUMBERS = [
    0, 1, 2, 3, 5, 6, -3, -4, 2**63 - 1, -(2**63), True, False, 0.0, -0.0, 0.5, 1.0, 2.0, 2.5, 2.5000000000000004,
    math.nextafter(0.5, 0), math.nextafter(0.5, 1), math.inf, -math.inf, math.nan, 5e-324, -5e-324, -1e308, 1e308,
]  # fmt: skip


def ordinary(value):
    return type(value) is int or (type(value) is float and math.isfinite(value) and str(value) != "-0.0")


def between(value, limits):
    return type(value), sum(limit <= value for limit in limits[type(value) is float])


@pytest.mark.parametrize("default", [1, 1.0, 2.0, None])
def test_numbers_between_the_same_limits_are_allowed_alike(default):
    for count in (1, 2):
        for known in itertools.combinations(KNOWN, count):
            limits = number_limits(known, default)
            answers = {}
            for value in filter(ordinary, NUMBERS):
                if repr(value) != repr(default):
                    kind, numbers = value_kind(value, str)
                    answer = tuple(is_in_ranges(ranges, kind, numbers, default) for ranges in known)
                    assert answers.setdefault(between(value, limits), answer) == answer, (known, value)


@pytest.mark.parametrize("known", KNOWN, ids=map(str, range(len(KNOWN))))
def test_a_number_is_served_if_and_only_if_python_allows_it(kernels, known):
    root = kernels({"add": "import torch\ndef add_kernel_impl(self, other, *, alpha=1):\n    return torch.neg(self)\n"})
    rows = {"add.Tensor": {"float32,float32": {**ROW, "arguments": {"alpha": known}}}}
    prove(root, "add", rows)
    decides = ProvenCalls(schema_of("add.Tensor"), with_extents(rows)["add.Tensor"], check_speed=True)
    x = torch.ones(4)
    order = NUMBERS * 2
    random.Random(0).shuffle(order)
    with opforge.enabled(root, device="cpu") as made:
        for value in order:
            before = made.counters()["add.Tensor"]["served"]
            with contextlib.suppress(RuntimeError):  # of ATen: a flag
                torch.add(x, x, alpha=value)
            allowed = not decides.why_not((x, x), {"alpha": value})
            assert made.counters()["add.Tensor"]["served"] == before + allowed, value


@pytest.mark.parametrize("known", [{}, {"float": [0.5, 2.5]}, {"default": [], "int": [1, 10**9], "float": [0.0, 1.0]}])
def test_python_is_not_asked_about_every_new_number(kernels, monkeypatch, known):
    root = kernels({"add": ADD})
    prove(root, "add", {"add.Tensor": {"float32,float32": {**ROW, "arguments": {"alpha": known}}}})
    asked = []
    ask = ProvenCalls.why_not
    monkeypatch.setattr(ProvenCalls, "why_not", lambda *given: asked.append(given) or ask(*given))
    x = torch.ones(4)
    with opforge.enabled(root, device="cpu"):
        for step in range(1, 500):
            torch.add(x, x, alpha=1 / (step + 1))
            torch.add(x, x, alpha=step + 1)
        assert len(asked) == 2
        torch.add(x, x)
        torch.add(x, x, alpha=math.nan)
        assert len(asked) == 4


def test_limits_are_those_of_the_kernels_that_are_enabled(kernels):
    first, second = kernels({"add": ADD}, mark=1000, folder="a"), kernels({"add": ADD}, mark=3000, folder="b")
    for root, known in ((first, {"int": [2, 4]}), (second, {"int": [4, 8]})):
        prove(root, "add", {"add.Tensor": {"float32,float32": {**ROW, "arguments": {"alpha": known}}}})
    x = torch.zeros(4)

    def marks():
        return [float(torch.add(x, x, alpha=alpha)[0]) for alpha in range(1, 10)]

    with opforge.enabled(first, device="cpu"):
        assert marks() == [0, 1000, 1000, 1000, 0, 0, 0, 0, 0]
        with opforge.enabled(second, device="cpu"):
            assert marks() == [0, 1000, 1000, 3000, 3000, 3000, 3000, 3000, 0]
        assert marks() == [0, 1000, 1000, 1000, 0, 0, 0, 0, 0]


def test_plans_are_for_one_value(enabled):  # noqa: F811
    """Eight plans at most share a geometry; calls with other numbers are Python's, and are not all recorded."""
    made = enabled("mul")
    value = torch.arange(100.0)
    scale = torch.ops.aten.mul.Scalar
    for _ in range(2):
        for factor in range(40):
            assert same_bits(scale(value, factor / 2), value * (factor / 2))
            assert same_bits(scale(value, factor), value * factor)
        made.learn()
    row = made.learn()["mul.Scalar"]
    assert row == {"plans": 16, "refused": {}}
    assert made.counters()["mul.Scalar"]["replayed"] == 16
