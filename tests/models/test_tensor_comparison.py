"""A model's tensors, compared element by element with ATen's own error."""

from __future__ import annotations

import math

import pytest
import torch

from opforge.models.tensor_comparison import MeasuredAnswers, TensorComparison, compare, float64_disagrees

EXACT = torch.linspace(-3, 3, 1000, dtype=torch.float64)
ATEN = (EXACT + 1e-6 * torch.cos(torch.arange(1000.0, dtype=torch.float64))).float()
EVERYWHERE = torch.full((1000,), 1e-6)


def moved(error: float) -> torch.Tensor:
    return (EXACT + error * torch.sin(torch.arange(1000.0, dtype=torch.float64))).float()


def compared(
    kernel: torch.Tensor, aten: torch.Tensor, exact: torch.Tensor | None, measured: torch.Tensor | None = None
) -> TensorComparison:
    answers = MeasuredAnswers(aten, exact, measured)
    return compare("output", kernel, aten, answers, may_differ=answers.may_differ)


@pytest.mark.parametrize(("error", "right"), [(0, True), (1e-6, True), (3e-6, True), (8e-6, False), (1e-3, False)])
def test_a_few_times_atens_own_error_is_allowed(error, right):
    found = compared(moved(error), ATEN, EXACT, EVERYWHERE)
    assert found.passed is right
    assert (found.excess > 1) is not right


def test_a_small_element_is_not_judged_by_the_largest_of_its_tensor():
    exact = torch.tensor([6000.0, 21.6], dtype=torch.float64)
    aten = exact.bfloat16()
    right, wrong = aten.clone(), aten.clone()
    right[1] += 0.125
    wrong[1] = 23.5  # 15 rounding steps
    assert compared(right, aten, exact).passed
    found = compared(wrong, aten, exact)
    assert not found.passed
    assert found.reason.startswith("output: 1 of 2 elements: error 1.9, allowed ")
    assert found.reason.endswith("worst at [1]: got 23.5, ATen has 21.625")


def test_an_error_in_one_element_is_seen_though_it_is_small_on_the_whole():
    kernel = ATEN.clone()
    kernel[7] += 1e-4
    assert compared(kernel, ATEN, EXACT, EVERYWHERE).reason.startswith("output: 1 of 1000 elements: error 0.0001")


def test_an_error_everywhere_is_seen_though_aten_has_one_large():
    aten = ATEN.clone()
    aten[7] += 1e-2
    assert not compared(moved(5e-3), aten, EXACT).passed


def test_atens_error_counts_as_it_was_seen_several_times():
    exact, aten, kernel = torch.tensor([1.0]).double(), torch.tensor([1.0]), torch.tensor([1 + 1e-5])
    assert not compared(kernel, aten, exact).passed
    assert compared(kernel, aten, exact, torch.tensor([5e-6])).passed
    assert not compared(kernel, aten, exact, torch.tensor([1e-6])).passed


def test_without_float64_it_is_compared_with_aten():
    assert compared(ATEN.clone(), ATEN, None).passed
    assert not compared(moved(1e-4), ATEN, None).passed
    assert compared(moved(1e-4), ATEN, None, torch.full((1000,), 5e-5)).passed


def test_float64_has_no_wider_dtype_and_34_rounding_steps():
    aten = torch.tensor([1.0], dtype=torch.float64)
    assert compared(aten + 30 * 2.0**-52, aten, None).passed
    assert not compared(aten + 40 * 2.0**-52, aten, None).passed


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (ATEN.double(), "dtype float64, ATen has float32"),
        (ATEN[:-1], "shape [999], ATen has [1000]"),
        (torch.where(ATEN > 2.9, math.nan, ATEN), "17 of 1000 elements: NaN or inf not where ATen has it"),
    ],
)
def test_other_faults_are_named(kernel, said):
    found = compared(kernel, ATEN, EXACT)
    assert found.reason.startswith(f"output: {said}")
    assert found.excess == math.inf


def test_where_aten_overflows_its_infinity_and_the_answer_are_both_right():
    exact = torch.tensor([1.0, 1e6]).double()
    aten = torch.tensor([1.0, math.inf])
    assert compared(aten.clone(), aten, exact).passed
    assert compared(torch.tensor([1.0, 1e6]), aten, exact).passed
    assert not compared(torch.tensor([1.0, math.nan]), aten, exact).passed
    assert not compared(torch.tensor([1.0, 5.0]), aten, torch.tensor([1.0, math.inf]).double()).passed


def test_integers_count_by_the_share_that_differs():
    aten = torch.arange(100)
    other = aten.clone()
    other[3] = 0
    assert compared(aten.clone(), aten, aten).passed
    assert not compared(other, aten, aten).passed
    assert compared(other, aten, aten, torch.tensor(0.01)).passed  # float64 decides as many otherwise


def test_a_float64_run_that_went_another_way_is_noticed():
    assert not float64_disagrees(ATEN, EXACT)
    assert float64_disagrees(ATEN, EXACT.flip(0))
    assert float64_disagrees(ATEN, EXACT[:-1])
    assert not float64_disagrees(torch.zeros(4), torch.zeros(4).double())
