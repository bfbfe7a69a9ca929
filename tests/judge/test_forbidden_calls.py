"""Which operators a kernel may not call: the same one by other names, and no others."""

from __future__ import annotations

import pytest

from opforge.judge.forbidden_calls import equivalent_packets, forbidden_operators
from opforge.ops import table
from opforge.ops.stems import stem, stem_of_function


@pytest.mark.parametrize(
    ("packet", "same"),
    [
        ("mm", ["bmm", "conv1d", "convolution", "_compute_linear_combination", "_embedding_bag", "_foreach_mm"]),
        ("_softmax", ["_masked_softmax", "softmax", "_log_softmax"]),
        ("native_layer_norm", ["native_group_norm", "_fused_rms_norm", "batch_norm"]),
        ("exp", ["_foreach_exp"]),
        ("max_pool2d_with_indices", ["max_pool1d", "mkldnn_max_pool2d", "adaptive_max_pool2d"]),
        ("sort", ["topk"]),
    ],
)
def test_an_operator_has_siblings(packet, same):
    assert set(same) <= set(equivalent_packets(packet))


@pytest.mark.parametrize(
    ("packet", "other"),
    [
        ("convolution", "mm"),
        ("_softmax", "amax"),
        ("relu", "clamp_min"),
        ("mean", "sum"),
        ("argmax", "min"),
        ("add", "sub"),
    ],
)
def test_what_it_may_be_made_of_is_no_sibling(packet, other):
    assert other not in equivalent_packets(packet)


def test_composite_siblings_are_left_to_their_parts():
    names = forbidden_operators([table().resolve("_softmax.default")])
    assert "_log_softmax.default" in names
    assert "log_softmax.int" not in names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_masked_softmax", "softmax"),
        ("masked_fill", "masked_fill"),
        ("view_copy", "view_copy"),
        ("avg_pool2d", "avg_pool"),
    ],
)
def test_stems(name, expected):
    assert stem(name) == expected


def test_stems_of_functions():
    assert {stem_of_function(n) for n in ("structured_mm_out_cpu", "mm_outf", "mm")} == {"mm"}
    assert stem_of_function("leaky_relu_stub") == "leaky_relu"
