"""Hostile forms keep what they say they keep, change what they say they change, and are all tried."""

from __future__ import annotations

import math

import pytest
import torch

from opforge.cases.forms import SAME_ELEMENTS, enlarged
from opforge.cases.twists import LAYOUTS, TWISTS, VALUES, Inputs, changed_contents, turns


def inputs(*tensors: torch.Tensor, **facts: object) -> Inputs:
    return Inputs(tensors, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SAME_ELEMENTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_a_layout_keeps_elements_and_changes_where_they_lie(name, dtype):
    tensor = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    (twisted,) = TWISTS[name](inputs(tensor))
    assert torch.equal(twisted, tensor)
    assert (twisted.stride(), twisted.storage_offset()) != (tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", ["strided", "offset"])
def test_what_lies_around_the_elements_is_poison(name):
    tensor = torch.arange(1.0, 7.0)
    for seed, poison in enumerate((torch.isnan, torch.isfinite, torch.isinf)):
        (twisted,) = TWISTS[name](inputs(tensor, seed=seed))
        whole = twisted.as_strided((twisted.untyped_storage().nbytes() // 4,), (1,), 0)
        assert poison(whole).sum() >= len(whole) - 6
        assert not torch.equal(whole[:6], tensor)
    (index,) = TWISTS[name](inputs(torch.arange(6)))
    assert index.as_strided((12,), (1,), 0).amax() < 6  # an index that is read in the wrong place is still one


def test_expanded_leaves_alone_what_is_written_and_what_may_be_a_position():
    tensor, index = torch.randn(3, 4), torch.arange(4)
    made = TWISTS["expanded"](inputs(tensor, index, tensor.clone(), written=frozenset({2})))
    assert made[0].stride() == (0, 1)
    assert made[1] is index
    assert made[2].stride() == (4, 1)


def test_empty_and_zero_dim():
    left, right = torch.randn(3, 4), torch.randn(3, 2)
    assert [t.shape for t in TWISTS["empty"](inputs(left, right))] == [(0, 4), (0, 2)]
    assert [t.shape for t in TWISTS["zero_dim"](inputs(left, right))] == [(), ()]
    assert TWISTS["zero_dim"](inputs(torch.empty(0))) is None


@pytest.mark.parametrize(
    ("name", "hurts"),
    [
        ("nan", lambda t: t.isnan()),
        ("inf", lambda t: t.isinf()),
        ("negative_zero", lambda t: (t == 0) & t.signbit()),
        ("denormals", lambda t: (t != 0) & (t.abs() < torch.finfo(t.dtype).smallest_normal)),
        ("extremes", lambda t: t.abs() >= torch.finfo(t.dtype).max / 4),
    ],
)
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t[1:, ::2], lambda t: t[:1, :1].expand(3, 5)])
def test_values_that_hurt_are_where_they_are_seen(name, hurts, layout):
    tensor = layout(torch.randn(6, 6))
    (twisted,) = TWISTS[name](inputs(tensor, pointwise=True))
    assert hurts(twisted).any()
    assert (twisted.shape, twisted.stride()) == (tensor.shape, tensor.stride())
    assert TWISTS[name](inputs(tensor, blank=frozenset({0}))) is None


def test_extremes_of_sums_stay_in_range_in_any_order():
    (twisted,) = TWISTS["extremes"](inputs(torch.randn(100)))
    assert torch.isfinite(twisted.square().sum())


def test_duplicates_are_values_that_were_there():
    tensor = torch.randn(50)
    (twisted,) = TWISTS["duplicates"](inputs(tensor))
    assert len(twisted.unique()) <= 3
    assert set(twisted.tolist()) <= set(tensor.tolist())


@pytest.mark.parametrize("reordered", [False, True])
def test_changed_contents_keep_first_and_last(reordered):
    tensor, index = torch.randn(4, 5), torch.arange(4)
    made, kept = changed_contents(inputs(tensor, index, indexes=True), reordered=reordered)
    assert not torch.equal(made, tensor)
    assert (made[0, 0], made[-1, -1]) == (tensor[0, 0], tensor[-1, -1])
    assert kept is index
    assert torch.equal(made.sum(), tensor.sum()) or torch.isclose(made.sum(), tensor.sum()) == reordered


def test_over_some_cases_every_twist_has_its_turn():
    (count, layouts), (also, values) = turns(0, 1, values=True)
    assert (count, set(layouts)) == (len(LAYOUTS), set(LAYOUTS))
    assert (also, set(values)) == (len(VALUES), set(VALUES))
    assert [set(names) for _, names in turns(0, 1, values=False)] == [set(LAYOUTS)]
    for cases in (3, 10, 40):
        seen = [name for n in range(cases) for count, names in turns(n, cases, values=True) for name in names[:count]]
        assert min(map(seen.count, LAYOUTS | VALUES)) >= 2


def test_booleans_are_turned_over_and_positions_are_left():
    mask, index = torch.ones(5, dtype=torch.bool), torch.arange(5)
    turned, same = TWISTS["integers"](inputs(mask, index, indexes=True))
    assert turned.sum() in (2, 3)
    assert same is index
    (extreme,) = TWISTS["integers"](inputs(index, pointwise=True))
    assert extreme.max() == torch.iinfo(torch.int64).max


@pytest.mark.parametrize(
    ("form", "shapes", "large"),
    [
        ("long_rows", [(5,)], [(69635,)]),
        ("long_rows", [(3, 4)], [(17, 4099)]),
        ("many_rows", [(3, 4), (4,), ()], [(16640, 4), (4,), ()]),
        ("long_rows", [(7, 3, 1), (1, 4)], [(2, 9, 1), (1, 4099)]),
        ("many_rows", [(2, 64, 64)], [(4352, 8, 8)]),
        ("many_rows", [(5,)], None),
        ("long_rows", [(5, 0)], None),
        ("long_rows", [(2, 3), (4,)], None),
        ("long_rows", [()], None),
    ],
)
def test_large_forms_broadcast_as_the_case_does(form, shapes, large):
    assert enlarged(form, shapes) == large
    if large is not None:
        assert math.prod(torch.broadcast_shapes(*large)) > 1 << 16


def test_elements_of_a_large_form_are_new_and_between_those_of_the_case():
    (made,) = TWISTS["long_rows"](inputs(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), pointwise=True))
    assert made.shape == (17, 4099)
    assert made.is_contiguous()
    assert (made.amin() >= 1) & (made.amax() <= 4)
    assert len(made.unique()) > made.numel() / 2
    (gaps,) = TWISTS["long_pitched"](inputs(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), pointwise=True))
    assert torch.equal(gaps, made)
    assert gaps.stride() == (4102, 1)
    matrix, index = torch.randn(3, 4), torch.arange(12).reshape(3, 4)
    assert TWISTS["long_rows"](inputs(matrix, index, indexes=True)) is None, "an index may be out of its range"
    assert TWISTS["long_rows"](inputs(matrix, torch.randn(4, 3))) is None, "a product is made of other shapes"
    many, booleans = TWISTS["many_rows"](inputs(matrix, matrix > 0, pointwise=True))
    assert many.shape == booleans.shape
    assert booleans.dtype == torch.bool


def test_one_tensor_is_given_for_two_arguments_that_are_alike():
    one, other, narrow = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    made = TWISTS["one_tensor_twice"](inputs(one, other, pointwise=True))
    assert made[1] is made[0]
    made = TWISTS["one_tensor_twice"](inputs(one, narrow, other, pointwise=True, written=frozenset({2})))
    assert [made[0] is one, made[1] is narrow, made[2] is one] == [True, True, True]
    assert TWISTS["one_tensor_twice"](inputs(one, other)) is None
    assert TWISTS["one_tensor_twice"](inputs(one, narrow, other.t(), pointwise=True)) is None
