"""Hostile forms keep what they say they keep, change what they say they change, and are all tried."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from opforge.cases.variant_shapes import SAME_ELEMENT_VARIANTS, enlarged_shapes
from opforge.cases.variants import (
    LAYOUT_VARIANTS,
    VALUE_VARIANTS,
    VARIANTS,
    CallTensors,
    changed_contents,
    variants_to_try,
)


def inputs(*tensors: torch.Tensor, **facts: object) -> CallTensors:
    return CallTensors(tensors, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SAME_ELEMENT_VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_a_layout_keeps_elements_and_changes_where_they_lie(name, dtype):
    tensor = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    (twisted,) = VARIANTS[name](inputs(tensor))
    assert torch.equal(twisted, tensor)
    assert (twisted.stride(), twisted.storage_offset()) != (tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", ["strided", "offset"])
def test_what_lies_around_the_elements_is_poison(name):
    tensor = torch.arange(1.0, 7.0)
    for seed, poison in enumerate((torch.isnan, torch.isfinite, torch.isinf)):
        (twisted,) = VARIANTS[name](inputs(tensor, seed=seed))
        whole = twisted.as_strided((twisted.untyped_storage().nbytes() // 4,), (1,), 0)
        assert poison(whole).sum() >= len(whole) - 6
        assert not torch.equal(whole[:6], tensor)
    (index,) = VARIANTS[name](inputs(torch.arange(6)))
    assert index.as_strided((12,), (1,), 0).amax() < 6  # an index that is read in the wrong place is still one


def test_expanded_leaves_alone_what_is_written_and_what_may_be_a_position():
    tensor, index = torch.randn(3, 4), torch.arange(4)
    made = VARIANTS["expanded"](inputs(tensor, index, tensor.clone(), written=frozenset({2})))
    assert made[0].stride() == (0, 1)
    assert made[1] is index
    assert made[2].stride() == (4, 1)


def test_empty_and_zero_dim():
    left, right = torch.randn(3, 4), torch.randn(3, 2)
    assert [t.shape for t in VARIANTS["empty"](inputs(left, right))] == [(0, 4), (0, 2)]
    assert [t.shape for t in VARIANTS["zero_dim"](inputs(left, right))] == [(), ()]
    assert VARIANTS["zero_dim"](inputs(torch.empty(0))) is None


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
    (twisted,) = VARIANTS[name](inputs(tensor, pointwise=True))
    assert hurts(twisted).any()
    assert (twisted.shape, twisted.stride()) == (tensor.shape, tensor.stride())
    assert VARIANTS[name](inputs(tensor, write_only=frozenset({0}))) is None


def test_extremes_of_sums_stay_in_range_in_any_order():
    (twisted,) = VARIANTS["extremes"](inputs(torch.randn(100)))
    assert torch.isfinite(twisted.square().sum())


def test_duplicates_are_values_that_were_there():
    tensor = torch.randn(50)
    (twisted,) = VARIANTS["duplicates"](inputs(tensor))
    assert len(twisted.unique()) <= 3
    assert set(twisted.tolist()) <= set(tensor.tolist())


@pytest.mark.parametrize("reordered", [False, True])
def test_changed_contents_keep_first_and_last(reordered):
    tensor, index = torch.randn(4, 5), torch.arange(4)
    made, kept = changed_contents(inputs(tensor, index, may_hold_indices=True), reordered=reordered)
    assert not torch.equal(made, tensor)
    assert (made[0, 0], made[-1, -1]) == (tensor[0, 0], tensor[-1, -1])
    assert kept is index
    assert torch.equal(made.sum(), tensor.sum()) or torch.isclose(made.sum(), tensor.sum()) == reordered


def test_over_some_cases_every_variant_is_used():
    (count, layouts), (also, values) = variants_to_try(0, 1, {}, with_values=True)
    assert (count, set(layouts)) == (len(LAYOUT_VARIANTS), set(LAYOUT_VARIANTS))
    assert (also, set(values)) == (len(VALUE_VARIANTS), set(VALUE_VARIANTS))
    assert [set(names) for _, names in variants_to_try(0, 1, {}, with_values=False)] == [set(LAYOUT_VARIANTS)]
    for cases in (3, 10, 40):
        seen = Counter[str]()
        for number in range(cases):
            for count, names in variants_to_try(number, cases, seen, with_values=True):
                seen.update(names[:count])
        assert min(seen[name] for name in LAYOUT_VARIANTS | VALUE_VARIANTS) >= 2


def test_booleans_are_turned_over_and_positions_are_left():
    mask, index = torch.ones(5, dtype=torch.bool), torch.arange(5)
    turned, same = VARIANTS["integers"](inputs(mask, index, may_hold_indices=True))
    assert turned.sum() in (2, 3)
    assert same is index
    (extreme,) = VARIANTS["integers"](inputs(index, pointwise=True))
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
    assert enlarged_shapes(form, shapes) == large
    if large is not None:
        assert math.prod(torch.broadcast_shapes(*large)) > 1 << 16


def test_elements_of_a_large_form_are_new_and_between_those_of_the_case():
    (made,) = VARIANTS["long_rows"](inputs(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), pointwise=True))
    assert made.shape == (17, 4099)
    assert made.is_contiguous()
    assert (made.amin() >= 1) & (made.amax() <= 4)
    assert len(made.unique()) > 6000
    assert not torch.equal(made.view(-1)[: 1 << 12], made.view(-1)[1 << 16 :][: 1 << 12])
    (gaps,) = VARIANTS["long_pitched"](inputs(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), pointwise=True))
    assert torch.equal(gaps, made)
    assert gaps.stride() == (4102, 1)
    matrix, index = torch.randn(3, 4), torch.arange(12).reshape(3, 4)
    assert VARIANTS["long_rows"](inputs(matrix, index, may_hold_indices=True)) is None, (
        "an index may be out of its range"
    )
    assert VARIANTS["long_rows"](inputs(matrix, torch.randn(4, 3))) is None, "a product is made of other shapes"
    many, booleans = VARIANTS["many_rows"](inputs(matrix, matrix > 0, pointwise=True))
    assert many.shape == booleans.shape
    assert booleans.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_large_forms_do_not_repeat(dtype):
    tensor = (torch.randn(6, 7, dtype=torch.complex64) if dtype.is_complex else 100 * torch.randn(6, 7)).to(dtype)
    tensor = torch.randn(6, 7) > 0 if dtype == torch.bool else tensor
    (made,) = VARIANTS["long_rows"](inputs(tensor, pointwise=True))
    flat = made.reshape(-1)
    for period in (2039, 4093, 4096, 4099, 8191, 1 << 16):
        assert not torch.equal(flat[: len(flat) - period], flat[period:])


def test_one_tensor_is_given_for_two_arguments_that_are_alike():
    one, other, narrow = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    made = VARIANTS["one_tensor_twice"](inputs(one, other, pointwise=True))
    assert made[1] is made[0]
    made = VARIANTS["one_tensor_twice"](inputs(one, narrow, other, pointwise=True, written=frozenset({2})))
    assert [made[0] is one, made[1] is narrow, made[2] is one] == [True, True, True]
    assert VARIANTS["one_tensor_twice"](inputs(one, other)) is None
    assert VARIANTS["one_tensor_twice"](inputs(one, narrow, other.t(), pointwise=True)) is None


def test_special_values_of_several_inputs_meet():
    one, other = VARIANTS["meeting"](inputs(torch.randn(7, 7), torch.randn(7, 7), pointwise=True))
    pairs = {tuple(map(repr, pair)) for pair in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)}
    assert len(pairs) == 49
    assert VARIANTS["meeting"](inputs(torch.randn(7), pointwise=True)) is None
    assert VARIANTS["meeting"](inputs(torch.randn(7), torch.randn(7))) is None


def test_edges_are_the_numbers_of_the_call_and_halves():
    (made,) = VARIANTS["edges"](inputs(torch.randn(20), pointwise=True, numbers=(0.3,)))
    step = torch.finfo(torch.float32).eps
    assert {torch.tensor(0.3 * factor).item() for factor in (1, 1 + step, 1 - step)} <= {*made.tolist()}
    assert {0.5, -0.5, 1.5, 2.5, -2.5, 0.1} & {*made.tolist()}


def test_numbers_on_both_sides_of_a_branch_cut():
    (made,) = VARIANTS["branch_cuts"](inputs(torch.randn(12, dtype=torch.complex64)))
    on_the_cut = made[(made.real == -1) & (made.imag == 0)]
    assert {*on_the_cut.angle().sign().tolist()} == {-1.0, 1.0}
    assert VARIANTS["branch_cuts"](inputs(torch.randn(12))) is None


def test_exponents_reach_the_end_of_the_range():
    (made,) = VARIANTS["exponents"](inputs(torch.zeros(28), pointwise=True))
    assert made.exp().isinf().any()
    assert made.cosh().isfinite().any()
    assert made.double().cosh().amax() < math.inf


def test_a_large_mean_beside_a_small_variance():
    tensor, weight = torch.randn(4, 6), torch.randn(6)
    made, same = VARIANTS["shifted"](inputs(tensor, weight))
    assert made.mean() > 1000 * made.std()
    assert same is weight


def test_rows_of_minus_infinity_alone():
    (made,) = VARIANTS["masked"](inputs(torch.randn(4, 6)))
    assert made[0].isneginf().all()
    assert made[1, :3].isneginf().all()
    assert made[1:, 3:].isfinite().all()
    tensor, other = torch.randn(4, 6), torch.randn(6, 4)
    first, second = VARIANTS["nan_in_first"](inputs(tensor, other))
    assert not first.isfinite().all()
    assert second is other


def test_integers_that_float64_cannot_tell_apart():
    (made,) = VARIANTS["wide_integers"](inputs(torch.arange(40)))
    assert len(made.unique()) > len(made.double().unique())
    assert VARIANTS["wide_integers"](inputs(torch.arange(4), may_hold_indices=True)) is None
    assert VARIANTS["wide_integers"](inputs(torch.arange(4), may_hold_counts=True)) is None
    (zeros,) = VARIANTS["zeros"](inputs(torch.arange(1, 5)))
    assert 0 in zeros


def test_positions_below_and_beyond_the_table():
    table, index = torch.randn(5, 3), torch.tensor([1, 4])
    for name, position in (("negative_position", -1), ("position_out_of_range", 18)):
        kept, made = VARIANTS[name](inputs(table, index, may_hold_indices=True, index_tensors=frozenset({1})))
        assert kept is table
        assert made.tolist() == [1, position]
        assert VARIANTS[name](inputs(table, index, may_hold_indices=True)) is None
    mask = torch.ones(5, dtype=torch.bool)
    assert VARIANTS["negative_position"](inputs(table, mask, index_tensors=frozenset({1}))) is None


def test_dimensions_that_are_multiples_of_sixteen():
    left, right = VARIANTS["sixteenfold"](inputs(torch.randn(2, 3), torch.randn(3, 5)))
    assert (left.shape, right.shape) == ((32, 48), (48, 80))
    (several,) = VARIANTS["sixteenfold"](inputs(torch.randn(5, 5, 5)))
    assert several.shape == (5, 80, 80)
    source, out = VARIANTS["sixteenfold"](inputs(torch.randn(2, 1), torch.zeros(2), write_only=frozenset({1})))
    assert (source.shape, out.shape) == ((32, 1), (0,))
    assert VARIANTS["sixteenfold"](inputs(torch.randn(3, 3, dtype=torch.float64))) is None
    assert VARIANTS["sixteenfold"](inputs(torch.randn(3, 3), pointwise=True)) is None


@pytest.mark.parametrize(("dim", "shape"), [(-1, (17, 4099)), (0, (4099, 17))])
def test_special_values_in_long_rows_lie_along_the_dimension_of_the_call(dim, shape):
    (made,) = VARIANTS["long_masked"](inputs(torch.randn(3, 4), dim=dim))
    assert made.shape == shape
    rows = made.movedim(dim, -1)
    assert rows[0, :300].isneginf().all()
    assert (rows.isnan().sum(), rows.isposinf().sum()) == (1, 1)
    assert (rows.isnan().nonzero()[0, 1] > 1024) & (rows.isposinf().nonzero()[0, 1] > 2048)
