"""A model's tensors, compared with ATen's own error."""

from __future__ import annotations

import math

import pytest
import torch

from opforge.models.tensor_comparison import Magnitude, compare, float64_disagrees

EXACT = torch.linspace(-3, 3, 1000, dtype=torch.float64)
ATEN = (EXACT + 1e-6 * torch.cos(torch.arange(1000.0, dtype=torch.float64))).float()


def moved(error):
    return (EXACT + error * torch.sin(torch.arange(1000.0, dtype=torch.float64))).float()


@pytest.mark.parametrize(("error", "right"), [(0, True), (1e-6, True), (3e-6, True), (8e-6, False), (1e-3, False)])
def test_a_few_times_atens_own_error_is_allowed(error, right):
    found = compare("output", moved(error), ATEN, EXACT)
    assert found.passed is right
    assert found.aten_error.largest == pytest.approx(1e-6, rel=0.2)
    assert (found.excess > 1) is not right


def test_an_error_in_one_element_is_seen_though_it_is_small_on_the_whole():
    kernel = ATEN.clone()
    kernel[7] += 1e-4
    found = compare("output", kernel, ATEN, EXACT)
    assert not found.passed
    assert found.reason.startswith("output: largest error 0.0001")


def test_an_error_everywhere_is_seen_though_aten_has_one_large():
    aten = ATEN.clone()
    aten[7] += 1e-2
    found = compare("output", moved(5e-3), aten, EXACT)
    assert not found.passed
    assert found.reason.startswith("output: typical error")


def test_atens_error_counts_as_it_was_seen_several_times():
    exact, aten, kernel = torch.tensor([1.0]).double(), torch.tensor([1.0]), torch.tensor([1 + 1e-5])
    assert not compare("loss", kernel, aten, exact).passed
    assert compare("loss", kernel, aten, exact, Magnitude(5e-6, 5e-6)).passed
    assert not compare("loss", kernel, aten, exact, Magnitude(1e-6, 1e-6)).passed


def test_without_float64_it_is_compared_with_aten():
    assert compare("output", ATEN.clone(), ATEN, None).passed
    assert not compare("output", moved(1e-4), ATEN, None).passed
    assert compare("output", moved(1e-4), ATEN, None, Magnitude(5e-5, 3e-5)).passed


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (ATEN.double(), "dtype float64, ATen has float32"),
        (ATEN[:-1], "shape [999], ATen has [1000]"),
        (torch.where(ATEN > 2.9, math.nan, ATEN), "17 of 1000 elements: NaN or inf not where ATen has it"),
    ],
)
def test_other_faults_are_named(kernel, said):
    found = compare("output", kernel, ATEN, EXACT)
    assert found.reason == f"output: {said}"
    assert found.excess == math.inf


def test_where_aten_overflows_its_infinity_and_the_answer_are_both_right():
    exact = torch.tensor([1.0, 1e6]).double()
    aten = torch.tensor([1.0, math.inf])
    assert compare("output", aten.clone(), aten, exact).passed
    assert compare("output", torch.tensor([1.0, 1e6]), aten, exact).passed
    assert not compare("output", torch.tensor([1.0, math.nan]), aten, exact).passed
    assert not compare("output", torch.tensor([1.0, 5.0]), aten, torch.tensor([1.0, math.inf]).double()).passed


def test_integers_count_by_the_share_that_differs():
    aten = torch.arange(100)
    other = aten.clone()
    other[3] = 0
    assert compare("output", aten.clone(), aten, aten).passed
    assert not compare("output", other, aten, aten).passed
    assert compare("output", other, aten, aten, Magnitude(0.01, 0.01)).passed  # float64 decides as many otherwise


def test_a_float64_run_that_went_another_way_is_noticed():
    assert not float64_disagrees(ATEN, EXACT)
    assert float64_disagrees(ATEN, EXACT.flip(0))
    assert float64_disagrees(ATEN, EXACT[:-1])
    assert not float64_disagrees(torch.zeros(4), torch.zeros(4).double())
