"""Each mutant is wrong in its one way, keeps the form of ATen's result, and knows where it is right."""

from __future__ import annotations

import pytest
import torch

from opforge.kernels.mutants import IGNORED_PREFIX, MUTANTS, mutants_of
from opforge.ops import table
from opforge.sandbox.guest.loader import LoadedKernel
from opforge.sandbox.mutants.mutant import Mutant, MutantEffect


def mutated(op: str, mutant: str) -> Mutant:
    kernel = LoadedKernel({"primary": op, "file": None, "entries": [], "mutant": mutant})
    function = kernel.callable_for(op)
    assert isinstance(function, Mutant)
    assert kernel.callable_for(op) is function
    return function


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values)


NAN, INF = float("nan"), float("inf")
WRONG = {
    "zeros": ([1.0, -2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]),
    "constant": ([1.0, -2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]),
    "identity": ([1.0, -2.0, 3.0, 4.0], [1.0, -2.0, 3.0, 4.0]),
    "edge": ([1.0, -2.0, 3.0, 4.0], [1.0, 0.0, 3.0, 0.0]),
    "tail": ([1.0, -2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 3.0, 0.0, 0.0]),
    "low_precision": ([1.0, 1.0 + 2**-10, 1.0 + 2**-11], [1.0, 1.0 + 2**-10, 1.0]),
    "nan_swallowed": ([1.0, NAN], [1.0, 0.0]),
    "inf_swallowed": ([1.0, INF], [1.0, torch.finfo(torch.float32).max]),
}


@pytest.mark.parametrize("mutant", WRONG)
def test_a_mutant_is_wrong_in_its_own_way(mutant):
    given, expected = WRONG[mutant]
    function = mutated("relu.default", mutant)
    assert function(vector(*given)).tolist() == expected
    assert function.effect is MutantEffect.CHANGED


@pytest.mark.parametrize("mutant", WRONG)
def test_a_mutant_in_place_and_out_writes_its_numbers_and_returns_what_it_wrote(mutant):
    given, expected = WRONG[mutant]
    for form, write in (("relu_.default", lambda f, x: (f(x), x)), ("relu.out", None)):
        if mutant == "identity" and form == "relu_.default":
            continue
        target = vector(*given) if write else torch.full((len(given),), -7.0)
        function = mutated(form, mutant)
        result = function(target) if write else function(vector(*given), out=target)
        assert result is target
        assert target.tolist() == expected


def test_nothing_is_written():
    target = vector(1.0, -2.0)
    assert mutated("relu_.default", "nothing_written")(target) is target
    assert target.tolist() == [1.0, -2.0]
    out = torch.full((2,), 9.0)
    assert mutated("relu.out", "nothing_written")(vector(1.0, -2.0), out=out) is out
    assert out.tolist() == [9.0, 9.0]


def test_strides_and_offset_are_ignored():
    base = torch.arange(6.0)
    assert mutated("abs.default", "strides_ignored")(base.view(2, 3).t()).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert mutated("abs.default", "offset_ignored")(base[2:]).tolist() == [0, 1, 2, 3]
    assert mutated("abs.default", "strides_ignored")(vector(1.0, 2.0).view(2, 1).expand(2, 2)).tolist() == [
        [1, 2],
        [1, 2],
    ]


def test_first_row_and_swapped():
    rows = torch.arange(4.0).view(2, 2)
    result = mutated("abs.default", "first_row")(rows)
    assert result.tolist() == [[0, 1], [0, 1]]
    assert result.stride() == (2, 1)
    assert mutated("sub.Tensor", "swapped")(vector(5.0), vector(3.0)).tolist() == [-2.0]
    target = vector(5.0)
    assert mutated("sub_.Tensor", "swapped")(target, vector(3.0)) is target
    assert target.tolist() == [-2.0]


def test_one_argument_is_ignored_wherever_it_stands():
    assert mutated("add.Tensor", "ignored:alpha")(vector(1.0), vector(2.0), alpha=3).tolist() == [3.0]
    assert mutated("sum.dim_IntList", "ignored:keepdim")(torch.ones(2, 3), [1], True).shape == (2,)
    assert mutated("topk.default", "ignored:dim")(torch.ones(2, 3), 1, 0, True)[0].shape == (2, 1)


def test_a_view_stays_a_view():
    base = torch.arange(6.0).view(2, 3)
    for mutant, expected in (("edge", [2, 3]), ("offset_ignored", [0, 1])):
        view = mutated("select.int", mutant)(base[:, 1:], 0, 0)
        assert view.tolist() == expected
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    zeros = mutated("select.int", "zeros")(base, 0, 0)
    assert zeros.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("op", "mutant", "args"),
    [
        ("add.Tensor", "swapped", (torch.randn(3), torch.randn(3))),
        ("clone.default", "identity", (torch.randn(3),)),
        ("zeros_like.default", "zeros", (torch.randn(3),)),
        ("zeros_like.default", "nan_swallowed", (torch.randn(3),)),
        ("sigmoid.default", "inf_swallowed", (torch.randn(3),)),
        ("signbit.default", "low_precision", (torch.randn(3),)),
        ("ones_like.default", "constant", (torch.randn(3),)),
        ("sum.default", "identity", (torch.randn(()),)),
        ("bitwise_not.default", "nan_swallowed", (torch.tensor([1, 2]),)),
    ],
)
def test_a_mutant_that_is_right_is_not_counted(op, mutant, args):
    function = mutated(op, mutant)
    function(*args)
    assert function.effect is MutantEffect.VOID


@pytest.mark.parametrize(
    ("op", "mutant", "args"),
    [
        ("relu.default", "identity", (vector(1.0, 2.0),)),
        ("relu.default", "nan_swallowed", (vector(1.0, 2.0),)),
        ("relu.default", "inf_swallowed", (vector(1.0, 2.0),)),
        ("relu.default", "strides_ignored", (vector(1.0, 2.0),)),
        ("relu.default", "offset_ignored", (vector(1.0, 2.0),)),
        ("sub.Tensor", "swapped", (vector(1.0, 2.0), vector(1.0, 2.0))),
        ("add.Tensor", "ignored:alpha", (vector(1.0, 2.0), vector(1.0, 2.0))),
        ("sum.dim_IntList", "ignored:keepdim", (torch.ones(2, 3), [1])),
        ("relu_.default", "nothing_written", (vector(1.0, 2.0),)),
    ],
)
def test_a_mutant_that_a_better_case_would_show_counts_and_answers_as_aten(op, mutant, args):
    expected = torch.ops.aten.__getattr__(op.partition(".")[0]).__getattr__(op.partition(".")[2])(*args)
    function = mutated(op, mutant)
    assert torch.equal(function(*args), expected)
    assert function.effect is MutantEffect.SAME


def test_errors_are_atens():
    with pytest.raises(RuntimeError, match="size of tensor"):
        mutated("add.Tensor", "zeros")(torch.ones(2), torch.ones(3))


def test_the_generator_is_left_where_aten_leaves_it():
    for op in ("bernoulli.default", "relu.default"):
        given = torch.full((8,), 0.5)
        torch.manual_seed(1)
        torch.ops.aten.__getattr__(op.partition(".")[0]).default(given)
        expected = torch.get_rng_state()
        torch.manual_seed(1)
        mutated(op, "zeros")(given)
        mutated("relu.default", "identity")(given.abs())
        assert torch.equal(torch.get_rng_state(), expected)


def test_which_mutants_an_operator_has_by_its_schema():
    names = {
        op: set(mutants_of(table().resolve(op)))
        for op in ("add", "add_", "add.out", "transpose.int", "empty_like", "bernoulli")
    }
    assert "nothing_written" in names["add_"] & names["add.out"]
    assert "nothing_written" not in names["add"]
    assert "identity" not in names["add_"]
    assert "swapped" in names["add"]
    assert "ignored:alpha" in names["add"]
    assert "zeros" not in names["transpose.int"]
    assert "strides_ignored" in names["transpose.int"]
    assert names["empty_like"] == set()
    assert "low_precision" not in names["bernoulli"]
    kinds = {n if not n.startswith(IGNORED_PREFIX) else IGNORED_PREFIX for op in table() for n in mutants_of(op)}
    assert kinds == set(MUTANTS)


def test_a_view_that_the_schema_does_not_tell_of_has_no_mutants_of_its_numbers():
    for op, args in (("atleast_1d.default", (torch.randn(3),)), ("unsafe_chunk.default", (torch.randn(4), 2))):
        function = mutated(op, "zeros")
        function(*args)
        assert function.effect is MutantEffect.VOID
    function = mutated("atleast_1d.default", "strides_ignored")
    function(torch.randn(3))
    assert function.effect is MutantEffect.SAME
