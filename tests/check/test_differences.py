"""What counts as a difference between two results."""

from __future__ import annotations

import itertools

import torch

from opforge.check.differences import Expectation, first_difference
from opforge.check.operator_call import OperatorCall


def test_an_operator_that_changes_from_call_to_call_is_not_judged_by_its_own_float64():
    shifts = itertools.count(0.0, 0.02)

    def drifting(call: OperatorCall) -> list[torch.Tensor]:
        return [call.tensors[0] + next(shifts)]

    x = torch.linspace(-2, 2, 9)
    expected = Expectation([x], OperatorCall((x,)), drifting)
    assert "9 of 9 elements" in first_difference(expected, [x + 0.05])
    assert not first_difference(expected, [x.clone()])


def test_sums_in_another_order_are_the_same():
    x = torch.linspace(-2, 2, 10_000).reshape(10, 1000)
    expected = Expectation([x.sum(1)], OperatorCall((x,)), lambda call: [call.tensors[0].sum(1)])
    assert not first_difference(expected, [x.flip(1).cumsum(1)[:, -1]])
    assert "3 of 10 elements" in first_difference(
        expected, [x.sum(1) + torch.tensor([0.0, 1.0] + [0.0] * 6 + [1.0, 1.0])]
    )
