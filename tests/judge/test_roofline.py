"""What calls must cost, counted by hand; and nobody honest is faster than light."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opforge.judge.roofline.arithmetic import ArithmeticKind
from opforge.judge.roofline.bound import ALARM_MARGIN, Cost, cost, hard_bound_us, sol_figures, sol_us
from opforge.judge.roofline.peaks import Peaks, load_or_measure
from opforge.judge.roofline.windows import window_use
from opforge.ops import table

F16, BF16, F64, I64 = torch.float16, torch.bfloat16, torch.float64, torch.int64


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def numbers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


def called(op: str, *args: Any, **kwargs: Any) -> Cost:
    facts = table().get(op)
    assert facts is not None, op
    if facts.base == "_fused_adamw_":
        kwargs = {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.9,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
        }
    result = getattr(getattr(torch.ops.aten, facts.base), facts.overload)(*args, **kwargs)
    return cost(facts, args, kwargs, result)


X = torch.arange(35.0).view(5, 7)

# operator, arguments, bytes, flops, bytes that no kernel goes without; all counted by hand, the way is in the remark
BY_HAND: list[tuple[str, Callable[[], tuple[Any, ...]], int, int, int]] = [
    ("relu.default", lambda: (r(5, 7),), 280, 35, 280),  # 35 in, 35 out, 4 bytes each
    ("relu.default", lambda: (r(7, 5).t(),), 280, 35, 280),  # transposed: the same elements
    ("relu.default", lambda: (r(10, 7)[::2],), 280, 35, 280),  # every second row: the others are not touched
    ("relu.default", lambda: (r(5, 1).expand(5, 7),), 20 + 140, 5, 160),  # 5 elements in
    ("relu_.default", lambda: (r(5, 7),), 280, 35, 140),  # the same memory read and written
    ("add.Tensor", lambda: (r(5, 7), r(7)), 140 + 28 + 140, 35, 308),  # broadcast
    ("add.Tensor", lambda: (X, X), 140 + 140, 35, 280),  # one tensor twice
    ("add.Tensor", lambda: (X[:2], X[2:4]), 56 + 56 + 56, 14, 168),  # two parts of one
    ("add_.Tensor", lambda: (r(5, 7), r(5, 7)), 420, 35, 280),
    ("add.Tensor", lambda: (r(5, 7, dtype=F16), r(5, 7)), 70 + 140 + 140, 35, 350),  # result in f32
    ("eq.Tensor", lambda: (r(5, 7), r(5, 7)), 280 + 35, 35, 315),  # booleans out
    ("where.self", lambda: (r(5, 7) > 0, r(5, 7), r(5, 7)), 35 + 140 + 140, 35, 35 + 140),  # of two, one is needed
    ("pow.Tensor_Scalar", lambda: (r(5, 7), 0), 140, 35, 140),  # ones, whatever comes in
    ("pow.Tensor_Scalar", lambda: (r(5, 7), 3), 280, 35, 280),
    ("isnan.default", lambda: (numbers(9, 5, 7),), 280 + 35, 35, 35),  # no integer is NaN
    ("_foreach_add.List", lambda: ([r(3), r(5)], [r(3), r(5)]), 3 * 32, 5, 96),
    ("sum.dim_IntList", lambda: (r(5, 7), [1]), 140 + 20, 35, 160),
    ("sum.default", lambda: (r(5, 1).expand(5, 7),), 20 + 4, 5, 24),  # five different ones
    ("sum.default", lambda: (numbers(9, 5, 7).to(torch.int8),), 35 + 8, 35, 43),  # the result has lanes of its own
    ("bitwise_and.Tensor", lambda: (r(5, 8) > 0, r(5, 8) > 0), 3 * 40, 10, 120),  # four booleans in a lane
    ("amax.default", lambda: (r(5, 7), [0]), 140 + 28, 35, 168),
    ("any.default", lambda: (r(5, 7) > 9,), 1 + 1, 0, 1),  # one that is true settles it
    ("equal.default", lambda: (X, X + 1), 4 + 4, 1, 0),
    ("masked_fill.Scalar", lambda: (X, X < 10, 1.0), 35 + 100 + 140, 35, 35 + 140),  # 25 stay
    ("masked_fill_.Scalar", lambda: (X.clone(), X < 10, 1.0), 35 + 40, 35, 35),
    ("max.dim", lambda: (r(5, 7), 1), 140 + 20 + 40, 35, 200),  # values and positions
    ("cumsum.default", lambda: (r(5, 7), 1), 280, 35, 280),
    ("topk.default", lambda: (r(5, 7), 2), 140 + 40 + 80, 35, 260),
    ("_softmax.default", lambda: (r(5, 7), 1, False), 280, 175, 280),
    ("native_layer_norm.default", lambda: (r(5, 7), [7], r(7), r(7), 1e-5), 140 + 56 + 140 + 40, 245, 140 + 180),
    ("native_layer_norm_backward.default", lambda: (r(5, 7), r(5, 7), [7], r(5, 1), r(5, 1), None, r(7), [False, False, True]),
     140 + 28, 35, 168),  # the bias's: what flows back will do
    ("native_layer_norm_backward.default", lambda: (r(5, 7), r(5, 7), [7], r(5, 1), r(5, 1), r(7), r(7), [True, True, True]),
     140 + 140 + 40 + 28 + 140 + 56, 245, 280 + 196),
    ("_native_batch_norm_legit_no_training.default", lambda: (r(5, 7), r(7), r(7), r(7), r(7).abs(), 0.1, 1e-5), 140 + 112 + 140, 70, 140),
    ("native_batch_norm_backward.default", lambda: (r(5, 7), r(5, 7), r(7), r(7), r(7).abs(), None, None, False, 1e-5, [True, False, False]),
     140 + 56 + 140, 35, 280),  # without statistics of its own the input is not needed
    ("_weight_norm_interface.default", lambda: (r(5, 7), r(5, 1)), 140 + 20 + 140 + 20, 105, 300),
    ("mm.default", lambda: (r(5, 7), r(7, 3)), 140 + 84 + 60, 210, 284),
    ("mm.default", lambda: (r(1, 7).expand(5, 7), r(7, 3)), 28 + 84 + 60, 42, 172),  # one row of results
    ("mm.default", lambda: (r(7, 5).t(), r(3, 7).t()), 284, 210, 284),
    ("mm.default", lambda: (r(5, 7, dtype=BF16), r(7, 3, dtype=BF16)), 142, 210, 142),
    ("mm.default", lambda: (torch.randn(5, 7, dtype=torch.complex64), torch.randn(7, 3, dtype=torch.complex64)), 568, 630, 568),  # three products of real numbers
    ("addmm.default", lambda: (r(3), r(5, 7), r(7, 3)), 12 + 284, 210, 296),
    ("bmm.default", lambda: (r(2, 5, 7), r(2, 7, 3)), 568, 420, 568),
    ("bmm.default", lambda: (r(1, 5, 7).expand(2, 5, 7), r(2, 7, 3)), 140 + 168 + 120, 420, 428),
    ("linear.default", lambda: (r(2, 5, 7), r(3, 7), r(3)), 280 + 84 + 12 + 120, 420, 496),
    ("matmul.default", lambda: (r(2, 5, 7), r(7)), 280 + 28 + 40, 140, 348),
    ("addmv.default", lambda: (r(5), r(5, 7), r(7)), 20 + 140 + 28 + 20, 70, 208),
    ("convolution.default", lambda: (r(2, 4, 9, 9), r(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
     2592 + 864 + 2352, 2 * 2 * 24 * 81, 2592 + 2352),  # 24 pairs of channels, 81 elements in each input
    ("convolution.default", lambda: (r(2, 4, 9, 9), r(6, 2, 3, 3), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 2),
     2592 + 432 + 768, 2 * 2 * 12 * 81, 768),
    ("convolution.default", lambda: (r(2, 4, 9, 9), r(6, 4, 1, 1), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
     2 * 4 * 25 * 4 + 96 + 1200, 2 * 2 * 24 * 25, 1200),  # what a step leaps over need not be read
    ("convolution.default", lambda: (r(1, 4, 2, 2), r(6, 4, 3, 3), None, [1, 1], [3, 3], [3, 3], False, [0, 0], 1),
     64 + 96 + 96, 2 * 24 * 4, 96),  # all taps but one are on padding
    ("convolution.default", lambda: (r(1, 4, 5), r(4, 6, 2), None, [2], [0], [1], True, [0], 1), 80 + 192 + 240, 2 * 24 * 10, 240),
    ("conv2d.padding", lambda: (r(1, 1, 5, 5), r(1, 1, 3, 3), None, [1, 1], "same"), 100 + 36 + 100, 2 * 25, 200),
    ("conv2d.default", lambda: (r(4, 9, 9), r(6, 4, 3, 3)), 1296 + 864 + 1176, 2 * 24 * 81, 1296 + 1176),  # without a batch
    ("convolution_backward.default", lambda: (r(2, 6, 7, 7), r(2, 4, 9, 9), r(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, [True, True, False]),
     2352 + 2592 + 432 + 2592 + 432, 4 * 2 * 12 * 81, 3024),
    ("scaled_dot_product_attention.default", lambda: (r(2, 3, 5, 8), r(2, 3, 7, 8), r(2, 3, 7, 8)), 960 + 1344 + 1344 + 960, 2 * 2 * 6 * 5 * 7 * 8, 4608),
    ("_scaled_dot_product_flash_attention_for_cpu.default", lambda: (r(1, 1, 4, 8), r(1, 1, 4, 8), r(1, 1, 4, 8), 0.0, True),
     4 * 128 + 16, 2 * 2 * 10 * 8, 144),  # causal: 10 of 16 pairs
    ("scaled_dot_product_attention.default", lambda: (r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 4, 8), None, 0.0, True), 64 + 64 + 64 + 64, 2 * 2 * 3 * 8, 64),
    ("scaled_dot_product_attention.default", lambda: (r(1, 1, 4, 8), r(1, 1, 4, 8), r(1, 1, 4, 8), torch.ones(4, 4).tril(1).bool()),
     4 * 128 + 16, 2 * 2 * 13 * 8, 128),  # the mask leaves 13 of 16 pairs
    ("embedding.default", lambda: (r(100, 6), 3 * torch.arange(15).view(3, 5)), 120 + 360 + 360, 90, 120 + 360),  # 15 rows of 100
    ("embedding.default", lambda: (r(100, 6), torch.tensor([[7, 7, 9]])), 24 + 48 + 72, 12, 24 + 72),  # two different ones
    ("embedding.default", lambda: (r(4, 6), torch.arange(15).view(3, 5) % 4), 120 + 96 + 360, 24, 480),  # not more than there are
    ("index_select.default", lambda: (r(50, 6), 0, torch.arange(4)), 32 + 96 + 96, 24, 128),
    ("gather.default", lambda: (r(50, 6), 0, torch.arange(18).view(3, 6)), 144 + 72 + 72, 18, 216),
    ("gather.default", lambda: (r(50, 6), 1, torch.tensor([[3, 3, 0], [1, 1, 1]])), 48 + 12 + 24, 3, 72),  # two and one
    ("take.default", lambda: (r(50, 6), torch.tensor([5, -295])), 16 + 4 + 8, 1, 24),  # the same place
    ("index.Tensor", lambda: (r(50, 6), [torch.arange(4), None]), 32 + 96 + 96, 24, 128),
    ("index.Tensor", lambda: (r(50, 6), [torch.zeros(3, 1, dtype=I64), torch.arange(2)]), 24 + 16 + 8 + 24, 2, 64),
    ("index.Tensor", lambda: (X, [X < 10]), 35 + 40 + 40, 10, 75),
    ("masked_select.default", lambda: (X, X < 10), 35 + 40 + 40, 10, 75),
    ("nll_loss_forward.default", lambda: (r(5, 7), numbers(7, 5), None, 1, -100), 40 + 20 + 4 + 4, 5, 48),
    ("nll_loss_forward.default", lambda: (r(5, 7), torch.tensor([3, 3, 4, -100, -100]), r(7), 1, -100), 40 + 12 + 8 + 8, 3, 48),
    ("nll_loss_backward.default", lambda: (r(()), r(5, 7), torch.tensor([3, 3, 4, -100, -100]), r(7), 1, -100, r(())),
     40 + 8 + 4 + 4 + 140, 3, 40),  # two classes' weights, one gradient, the total; the scores are not read
    ("nll_loss_backward.default", lambda: (r(5), r(5, 7), torch.tensor([3, 3, 4, -100, -100]), None, 0, -100, r(())),
     40 + 12 + 140, 3, 40),
    ("embedding_dense_backward.default", lambda: (r(4, 6), torch.tensor([2, 0, 0, 3]), 9, 0, False), 32 + 48 + 216, 12, 32),
    ("scatter.src", lambda: (r(50), 0, torch.arange(6), r(6)), 48 + 24 + 176 + 200, 0, 48 + 200),  # 44 stay as they are
    ("scatter.src", lambda: (r(50), 0, torch.tensor([1, 1, 2]), r(3)), 24 + 8 + 192 + 200, 0, 24 + 200),  # of two, one is written
    ("scatter_.src", lambda: (r(50), 0, torch.arange(6), r(6)), 48 + 24 + 24, 0, 48),
    ("index_add_.default", lambda: (r(50, 3), 0, torch.arange(4), r(4, 3)), 32 + 48 + 48 + 48, 12, 32 + 48),
    ("index_add_.default", lambda: (r(50, 3), 0, torch.zeros(4, dtype=I64), r(4, 3)), 32 + 48 + 12 + 12, 12, 32 + 48),
    ("scatter_reduce_.two", lambda: (r(50), 0, torch.arange(6), r(6), "sum"), 48 + 24 + 24 + 24, 6, 48 + 24),
    ("index_put_.default", lambda: (r(50, 3), [torch.arange(4)], r(4, 3), False), 32 + 48 + 48, 0, 32),
    ("index_put.default", lambda: (X, [X < 10], r(())), 35 + 4 + 100 + 140, 0, 35 + 140),  # 25 stay
    ("index_fill.int_Scalar", lambda: (r(50, 3), 0, torch.arange(4), 1.5), 32 + 552 + 600, 0, 632),
    ("masked_scatter.default", lambda: (X, X < 10, r(20)), 35 + 100 + 40 + 140, 0, 35 + 140),
    ("masked_scatter_.default", lambda: (X.clone(), X < 10, r(20)), 35 + 40 + 40, 0, 35),
    ("trace.default", lambda: (r(5, 7),), 20 + 4, 5, 4),
    ("fill_diagonal_.default", lambda: (r(5, 7), 1.0), 20, 0, 0),
    ("max_pool2d.default", lambda: (r(1, 1, 8, 8), [1, 1], [2, 2]), 64 + 64, 16, 64),  # a fourth of it
    ("avg_pool1d.default", lambda: (r(1, 3, 9), [2]), 96 + 48, 12, 48),  # the last element is left over
    ("upsample_nearest2d.default", lambda: (r(1, 1, 8, 8), [4, 4]), 64 + 64, 16, 64),
    ("upsample_nearest2d.default", lambda: (r(1, 1, 4, 4), [8, 8]), 64 + 256, 64, 256),
    ("_fused_adamw_.default", lambda: ([r(9)], [r(9)], [r(9)], [r(9)], [], [torch.ones(())]), 4 * 36 + 4 + 3 * 36, 9, 0),
    ("clone.default", lambda: (r(5, 1).expand(5, 7),), 20 + 140, 0, 160),
    ("contiguous.default", lambda: (r(7, 5).t(),), 280, 0, 280),
    ("contiguous.default", lambda: (r(5, 7),), 0, 0, 0),  # it is already: a view
    ("_to_copy.default", lambda: (r(5, 7),), 280, 0, 280),
    ("copy_.default", lambda: (r(5, 7), r(7)), 28 + 140, 0, 168),
    ("cat.default", lambda: ([r(2, 7), r(3, 7)],), 280, 0, 280),
    ("cat.default", lambda: ([X[:2], X[2:]],), 280, 0, 280),
    ("slice_copy.Tensor", lambda: (r(50, 7), 0, 3, 8), 280, 0, 140),
    ("expand_copy.default", lambda: (r(5, 1), [5, 7]), 160, 0, 160),
    ("flip.default", lambda: (r(5, 7), [0]), 280, 0, 280),
    ("tril.default", lambda: (r(4, 3),), 9 * 4 + 48, 0, 0),  # 1 + 2 + 3 + 3 elements; zeros need no writing
    ("triu_.default", lambda: (r(4, 3), 1), 9 * 4, 0, 0),
    ("fill_.Scalar", lambda: (r(5, 7), 1.5), 140, 0, 140),
    ("full.default", lambda: ([5, 7], 1.5), 140, 0, 140),
    ("zeros.default", lambda: ([5, 7],), 140, 0, 0),  # fresh memory is zero already
    ("arange.default", lambda: (9,), 72, 0, 72),
    ("empty.memory_format", lambda: ([5, 7],), 0, 0, 0),
    ("view.default", lambda: (r(5, 7), [35]), 0, 0, 0),
    ("split.Tensor", lambda: (r(6, 7), 2), 0, 0, 0),
    ("addmm.default", lambda: (r(5, 3), r(5, 7), r(7, 3)), 60 + 284, 210, 344),
    ("relu.default", lambda: (r(0, 7),), 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "arguments", "nbytes", "flops", "sure"), BY_HAND, ids=[f"{n}-{row[0]}" for n, row in enumerate(BY_HAND)]
)
def test_costs_are_those_counted_by_hand(op, arguments, nbytes, flops, sure):
    found = called(op, *arguments())
    assert (found.moved_bytes, found.flops, found.required_bytes) == (nbytes, flops, sure)
    assert found.method == "formula"


def test_out_forms_write_what_they_are_given_and_do_not_read_it():
    assert called("relu.out", r(5, 7), out=torch.empty(5, 7)) == called("relu.default", r(5, 7))
    assert called("mm.out", r(5, 7), r(7, 3), out=torch.empty(5, 3)).moved_bytes == 284


def test_factors_of_zero_take_their_share_away():
    assert called("addmm.default", r(5, 3), r(5, 7), r(7, 3), beta=0).moved_bytes == 284
    assert called("addmm.default", r(5, 3), r(5, 7), r(7, 3), alpha=0).moved_bytes == 120
    assert called("addmm.default", r(5, 3), r(5, 7), r(7, 3), alpha=0).required_flops == 0


@pytest.mark.parametrize(
    ("dtype", "elementwise", "product"),
    [
        (F64, ArithmeticKind.F64, ArithmeticKind.F64_MATMUL),
        (torch.float32, ArithmeticKind.F32, ArithmeticKind.F32_MATMUL),
        (F16, ArithmeticKind.F32, ArithmeticKind.F16_MATMUL),
        (BF16, ArithmeticKind.F32, ArithmeticKind.BF16_MATMUL),
        (I64, ArithmeticKind.INTEGER, ArithmeticKind.INTEGER),
    ],
)
def test_the_kind_of_arithmetic_follows_the_dtype(dtype, elementwise, product):
    x = torch.ones(4, 4).to(dtype)
    assert called("add.Tensor", x, x).kind is elementwise
    assert called("mm.default", x, x).kind is product


def test_operators_without_a_formula_are_estimated():
    found = called("_cdist_forward.default", r(5, 7), r(3, 7), 2.0, None)
    assert (found.method, found.moved_bytes, found.flops, found.required_bytes) == ("estimate", 140 + 84 + 60, 35, 60)


def test_tensors_without_strides_are_estimated():
    found = called("mm.default", r(5, 7).to_sparse(), r(7, 3))
    assert (found.method, found.moved_bytes, found.required_bytes) == ("estimate", 84 + 60, 60)


def test_overlapping_windows_count_each_place_once():
    windows = torch.arange(20.0).unfold(0, 5, 3)  # 6 windows over 20 elements
    assert called("sum.default", windows).moved_bytes == 4 * 20 + 4
    apart = torch.arange(20.0).unfold(0, 2, 3)  # 7 windows of 2: 14 places, which do not lie evenly
    assert called("sum.default", apart).moved_bytes == 4 * 14 + 4


def test_indices_without_contents_choose_as_little_as_they_may():
    with FakeTensorMode():
        rows = torch.empty(4, dtype=I64)
        assert called("index_select.default", torch.empty(50, 6), 0, rows).moved_bytes == 32 + 24 + 96
        assert called("nll_loss_forward.default", torch.empty(4, 6), rows, None, 1, -100).moved_bytes == 32 + 8
        kept = called("index_put.default", torch.empty(50), [torch.empty(50, dtype=torch.bool)], torch.empty(()))
        assert kept.moved_bytes == 50 + 200  # the mask may replace all, or nothing
        masked = torch.empty(1, 1, 4, 8), torch.empty(1, 1, 4, 8), torch.empty(1, 1, 4, 8), torch.empty(4, 4)
        assert called("scaled_dot_product_attention.default", *masked).flops == 0


def test_what_changes_only_the_geometry_costs_nothing():
    assert called("t_.default", r(5, 7)).moved_bytes == 0
    assert called("as_strided_.default", r(5, 7), [3], [1]).moved_bytes == 0


@pytest.mark.parametrize(
    ("steps", "padding", "spacing", "taps"), [(1, 0, 1, 3), (1, 1, 1, 3), (2, 0, 1, 1), (3, 2, 2, 4), (1, 9, 9, 3), (5, 1, 3, 2)]
)  # fmt: skip
def test_windows_use_what_a_walk_over_them_finds(steps, padding, spacing, taps):
    windows = (11 + 2 * padding - spacing * (taps - 1) - 1) // steps + 1
    places = {(w, t, w * steps + t * spacing - padding) for w in range(windows) for t in range(taps)}
    pairs = [place for place in places if 0 <= place[2] < 11]
    use = window_use([11], [windows], [taps], [steps], [padding], [spacing])
    assert (use.pairs, use.windows) == (len(pairs), windows)
    assert (use.elements, use.taps) == (len({p for *_, p in pairs}), len({t for _, t, _ in pairs}))
    assert use.window_share == len({w for w, *_ in pairs}) / windows


def test_tensors_without_contents_cost_the_same():
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            x, y = torch.empty(5, 7), torch.empty(7, 3)
            assert called("mm.default", x, y).moved_bytes == 284
            assert called("relu.default", x.t()).required_bytes == 280
            assert called("add.Tensor", x, x).moved_bytes == 280
            assert called("view.default", x, [35]).moved_bytes == 0


PEAKS = Peaks(
    device="a device",
    device_type="cuda",
    bandwidth_curve=((1 << 20, 1e12), (1 << 26, 1e11)),
    in_place_curve=((1 << 20, 1e12), (1 << 26, 2e11)),
    rates={ArithmeticKind.F32_MATMUL: 1e13, ArithmeticKind.TF32_MATMUL: 8e13, ArithmeticKind.BF16_MATMUL: 1e14},
    launch_us=1.0,
    call_us=5.0,
)


def _cost(**fields: Any) -> Cost:
    plain = {"moved_bytes": 0, "in_place": False, "flops": 0, "kind": ArithmeticKind.F32, "method": "formula"}
    return Cost(**{**plain, **fields})


def test_memory_is_as_far_away_as_the_footprint_says():
    made = _cost(moved_bytes=2_000_000)
    assert sol_us(made, PEAKS, 1 << 20) == (pytest.approx(2.0), "memory")
    assert sol_us(made, PEAKS, 1 << 30) == (pytest.approx(20.0), "memory")
    back = _cost(moved_bytes=2_000_000, in_place=True)
    assert sol_us(back, PEAKS, 1 << 30) == (pytest.approx(10.0), "memory")  # 1 MB at 0.1 TB/s, or 2 MB at 0.2


def test_products_are_bound_by_the_arithmetic_that_their_kind_allows():
    made = _cost(moved_bytes=1000, flops=10**9, kind=ArithmeticKind.F32_MATMUL)
    assert sol_us(made, PEAKS, 1000) == (pytest.approx(37.5), "compute")  # as three products of tf32
    assert sol_us(_cost(flops=10**9, kind=ArithmeticKind.F32), PEAKS, 1000)[0] == pytest.approx(100.0)  # no product
    assert sol_us(_cost(flops=10**9, kind=ArithmeticKind.TF32_MATMUL), PEAKS, 1000)[0] == pytest.approx(12.5)
    assert (
        sol_us(_cost(flops=10**9, kind=ArithmeticKind.F8_MATMUL), PEAKS, 1000)[0] == 0
    )  # nothing is known of it: no bound


@pytest.fixture
def precisions():
    """Torch's settings of products and convolutions on a GPU, restored afterwards."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [place.fp32_precision for place in places]
    yield places
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


def test_the_judges_settings_say_whether_tf32_is_allowed(precisions):
    matmul, conv = precisions
    with FakeTensorMode():
        image, weight, matrix, half = (
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape, dtype in (((1, 4, 9, 9), None), ((6, 4, 3, 3), None), ((8, 8), None), ((8, 8), F16))
        )
        conv_args = (image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        back_args = (torch.empty(1, 6, 7, 7, device="cuda"), image, weight, *conv_args[2:], [True, True, False])

        def kinds() -> list[ArithmeticKind]:
            calls = ("convolution", conv_args), ("convolution_backward", back_args), ("mm", (matrix, matrix))
            return [called(f"{op}.default", *args).kind for op, args in calls]

        assert kinds() == [ArithmeticKind.TF32_MATMUL, ArithmeticKind.TF32_MATMUL, ArithmeticKind.F32_MATMUL]
        conv.fp32_precision, matmul.fp32_precision = "ieee", "tf32"
        assert kinds() == [ArithmeticKind.F32_MATMUL, ArithmeticKind.F32_MATMUL, ArithmeticKind.TF32_MATMUL]
        assert called("mm.default", half, half).kind is ArithmeticKind.F16_MATMUL  # only f32 is rounded
    assert called("convolution.default", r(1, 4, 9, 9), r(6, 4, 3, 3), *conv_args[2:]).kind is ArithmeticKind.F32_MATMUL


def test_what_takes_less_than_the_smallest_launch_is_bound_by_latency_and_has_no_percentage():
    made = _cost(moved_bytes=2_000_000)
    below, above = (sol_figures(made, PEAKS, 1 << 20, 4.0, 8.0, floor_us=us)["sol"] for us in (2.1, 1.9))
    assert (below["bound"], above["bound"]) == ("latency", "memory")
    assert below["us"] == above["us"] == pytest.approx(2.0)
    assert ("kernel" in below, "aten" in below, "kernel" in above, "aten" in above) == (False, False, True, True)
    made = _cost(moved_bytes=2_000_000, required_bytes=2_000_000)
    assert "alarm" in sol_figures(made, PEAKS, 1 << 20, kernel_us=0.1, aten_us=8.0, floor_us=2.1)  # an alarm stays


def test_results_that_stay_in_the_cache_need_not_reach_memory():
    made = _cost(moved_bytes=3_000_000, written_bytes=1_000_000)
    assert [sol_us(made, PEAKS, 1 << 26, kept_bytes=kept)[0] for kept in (0, 400_000, 5_000_000)] == [
        pytest.approx(us) for us in (30.0, 26.0, 20.0)
    ]
    assert sol_us(made, PEAKS, 1 << 20, kept_bytes=5_000_000)[0] == pytest.approx(3.0)  # they reach the cache


def test_calls_touch_what_they_need_of_a_table_and_memory_written_back_once():
    table_call = called("embedding.default", r(1000, 6), torch.arange(5))
    assert table_call.footprint(10) == 10 * table_call.moved_bytes == 10 * (40 + 120 + 120)
    assert called("relu_.default", r(5, 7)).footprint(10) == 10 * 140
    assert called("add.Tensor", r(5, 7), r(5, 7)).footprint(1) == 420
    assert called("add.Tensor", X, X).footprint(1) == 280


def test_shares_are_percent_of_light_and_the_alarm_is_for_what_cannot_be():
    made = _cost(moved_bytes=2_000_000, required_bytes=2_000_000, required_input_bytes=1_000_000)
    fields = sol_figures(made, PEAKS, 1 << 20, kernel_us=4.0, aten_us=8.0)
    assert fields == {
        "sol": {
            "bytes": 2_000_000, "flops": 0, "us": pytest.approx(2.0), "bound": "memory", "kernel": pytest.approx(50.0),
            "aten": pytest.approx(25.0), "counted": "formula",
        }
    }  # fmt: skip
    assert "alarm" not in sol_figures(made, PEAKS, 1 << 20, kernel_us=1.8, aten_us=8.0)  # within what peaks are worth
    assert (
        "faster than the speed of light (SOL): 0.2 µs"
        in sol_figures(made, PEAKS, 1 << 20, kernel_us=0.2, aten_us=8.0)["alarm"]
    )
    assert "alarm" not in sol_figures(
        made, PEAKS, 1 << 20, kernel_us=0.2, aten_us=8.0, kernel_us_high=1.8
    )  # not surely faster
    assert "alarm" not in sol_figures(made, PEAKS, 1 << 20, kernel_us=0.2, aten_us=0.3)  # then the peaks are wrong


def test_a_product_made_of_faster_arithmetic_is_no_alarm_and_one_beyond_all_arithmetic_is():
    n = 1024
    made = called("mm.default", r(n, n), r(n, n))
    f32_us = 2 * n**3 / 1e13 * 1e6
    assert "alarm" not in sol_figures(
        made, PEAKS, made.moved_bytes, kernel_us=f32_us / 5, aten_us=f32_us
    )  # as three of bf16
    assert "alarm" in sol_figures(made, PEAKS, made.moved_bytes, kernel_us=f32_us / 50, aten_us=f32_us)


@pytest.fixture(scope="module")
def here(shared_server) -> Peaks:
    return load_or_measure(shared_server.spawner, "cpu")


def _slow_us(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median of some times and a high quantile."""
    times = []
    for _ in range(9):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return statistics.median(times), sorted(times)[-2]


LARGE: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
    (op, make)
    for n in (1 << 8, 1 << 14, 1 << 20)
    for op, make in (
        ("relu.default", lambda n=n: (r(n),)),
        ("relu_.default", lambda n=n: (r(n),)),
        ("add.Tensor", lambda n=n: (r(n), r(n))),
        ("sum.default", lambda n=n: (r(n),)),
        ("dot.default", lambda n=n: (r(n), r(n))),
        ("clone.default", lambda n=n: (r(n),)),
        ("zeros.default", lambda n=n: ([n],)),
        ("fill_.Scalar", lambda n=n: (r(n), 1.5)),
        ("zero_.default", lambda n=n: (r(n),)),
        ("copy_.default", lambda n=n: (r(n), r(n))),
        ("where.self", lambda n=n: (torch.ones(n) > 0, r(n), r(n))),
        ("any.default", lambda n=n: (torch.ones(n) > 0,)),
        ("pow.Tensor_Scalar", lambda n=n: (r(n), 0)),
        ("isnan.default", lambda n=n: (numbers(9, n),)),
        ("_to_copy.default", lambda n=n: (r(n), )),
        ("gather.default", lambda n=n: (r(n), 0, torch.zeros(n, dtype=I64))),
        ("_softmax.default", lambda n=n: (r(n), 0, False)),
        ("mv.default", lambda n=n: (r(n // 16, 16), r(16))),
        ("mm.default", lambda n=n: (r(n // 256, 256), r(256, 64))),
        ("mm.default", lambda n=n: (r(n // 256, 256, dtype=BF16), r(256, 64, dtype=BF16))),
        ("tril.default", lambda n=n: (r(n // 64, 64),)),
        ("masked_fill_.Scalar", lambda n=n: (r(n), torch.zeros(n) > 0, 1.0)),
        ("expand.default", lambda n=n: (r(1, 16), [n, 16])),
        ("cat.default", lambda n=n: ([r(n), r(n)],)),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("op", "make"), LARGE, ids=[f"{n}-{row[0]}" for n, row in enumerate(LARGE)])
def test_aten_is_never_faster_than_light_here(op, make, here):
    facts = table().get(op)
    function = getattr(getattr(torch.ops.aten, facts.base), facts.overload)
    args = make()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = cost(facts, args, {}, function(*args))
        median, slow = _slow_us(lambda: function(*args))
    finally:
        torch.set_num_threads(threads)
    fields = sol_figures(made, here, max(1, made.required_bytes), median, aten_us=1e9, kernel_us_high=slow)
    assert "alarm" not in fields, fields
    bound = hard_bound_us(made, here, max(1, made.required_bytes))
    if bound > 0:
        pretended = bound * (1 - ALARM_MARGIN["cpu"]) / 3
        assert "alarm" in sol_figures(made, here, max(1, made.required_bytes), pretended, aten_us=1e9)
