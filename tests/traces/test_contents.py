"""What contents calls need."""

from __future__ import annotations

import pytest

from opforge.cases.text import parse_arguments
from opforge.traces.call_cost import flops, input_bytes
from opforge.traces.contents import IntegersBelow, Need, content_needs, with_value_ranges

FREE, KEPT = Need.ANY, Need.EXACT


@pytest.mark.parametrize(
    "op, args, expected",
    [
        ("embedding.default", "((T([10, 4], f32), T([3], i64)), {})", [FREE, IntegersBelow(10)]),
        ("gather.default", "((T([5, 7], f32), -1, T([5, 2], i64)), {})", [FREE, IntegersBelow(7)]),
        ("scatter_add_.default", "((T([5, 7], f32), 0, T([5, 7], i64), T([5, 7], f32)), {})", [FREE, IntegersBelow(5), FREE]),
        ("scatter.src", "((T([5], f32), 0, T([3], i64), T([3], f32)), {})", [FREE, KEPT, FREE]),
        ("scatter_.value", "((T([5], f32), 0, T([3], i64), 1.0), {})", [FREE, IntegersBelow(5)]),
        ("index.Tensor", "((T([5, 6, 7], f32), [None, T([2], i64), T([2], i64)]), {})", [FREE, IntegersBelow(6), IntegersBelow(7)]),
        ("index.Tensor", "((T([5, 6, 7], f32), [T([5, 6], b8), T([2], i64)]), {})", [FREE, FREE, IntegersBelow(7)]),
        ("index_put.default", "((T([5], f32), [T([2], i64)], T([2], f32)), {})", [FREE, KEPT, FREE]),
        ("index_put.default", "((T([5], f32), [T([2], i64)], T([2], f32), True), {})", [FREE, IntegersBelow(5), FREE]),
        ("nll_loss_forward.default", "((T([8, 9], f32), T([8], i64), None, 1, -100), {})", [FREE, IntegersBelow(9)]),
        ("add.Tensor", "((T([8], i64), T([8], i64)), {})", [FREE, FREE]),
        ("view.default", "((T([8], i64), [2, 4]), {})", [FREE]),
        ("cumsum.default", "((T([8], i64), 0), {})", [FREE]),
        ("_grouped_mm.default", "((T([8, 8], bf16), T([2, 8, 8], bf16), T([2], i32)), {})", [FREE, FREE, KEPT]),
        ("linalg_cholesky_ex.default", "((T([3, 3], f32),), {})", [KEPT]),
        ("mine::op.default", "((T([3], f32), T([3], i64)), {})", [FREE, KEPT]),
    ],
)  # fmt: skip
def test_needs(op, args, expected):
    assert content_needs(op, parse_arguments(args)) == expected


def test_without_values_ranges_are_those_that_operators_need_and_what_needs_more_is_refused():
    (_, indices), _ = with_value_ranges("embedding.default", parse_arguments("((T([10, 4], f32), T([3], i64)), {})"))
    assert (indices.low, indices.high) == (0, 10)
    with pytest.raises(ValueError, match="exact contents"):
        with_value_ranges("index_copy.default", parse_arguments("((T([5], f32), 0, T([2], i64), T([2], f32)), {})"))


@pytest.mark.parametrize(
    "op, args, expected",
    [
        ("mm.default", "((T([2, 3], f32), T([3, 5], f32)), {})", 2 * 2 * 3 * 5),
        ("addmm.default", "((T([5], f32), T([2, 3], f32), T([3, 5], f32)), {})", 2 * 2 * 3 * 5),
        ("bmm.default", "((T([7, 2, 3], f32), T([7, 3, 5], f32)), {})", 7 * 2 * 2 * 3 * 5),
        (
            "convolution.default",
            "((T([2, 3, 8, 8], f32), T([4, 3, 3, 3], f32), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), {})",
            2 * 2 * 4 * 4 * 4 * 27,
        ),
        ("relu.default", "((T([2, 3], f32),), {})", 0),
    ],
)
def test_operations_are_counted(op, args, expected):
    assert flops(op, parse_arguments(args)) == expected


def test_bytes_are_those_that_the_memory_of_inputs_takes():
    assert input_bytes(parse_arguments("((T([4, 4], f32, stride=(0, 1)), [T([2], i64)]), {})")) == 16 + 16
    assert input_bytes(parse_arguments("((T([4], f32, offset=4096000),), {})")) == 16


def test_a_call_that_reads_a_workspace_is_not_replayed():
    """On the CPU and on a GPU alike: the workspace is known to the forward call alone."""
    for op in ("mkldnn_rnn_layer_backward.default", "_cudnn_rnn_backward.default"):
        with pytest.raises(ValueError, match="reads the workspace of the call before it"):
            content_needs(op, parse_arguments("((T([2, 2], f32),), {})"))
