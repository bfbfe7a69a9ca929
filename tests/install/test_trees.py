"""Nested values: leaves in order, and copies with some leaves changed."""

from __future__ import annotations

import collections

import torch

from opforge.runtime.trees import instances, leaves, map_instances

Pair = collections.namedtuple("Pair", "low high")  # noqa: PYI024  # as libraries make them


def test_leaves_come_in_order():
    assert list(leaves([1, (2, {"a": 3, "b": [4]}), None])) == [1, 2, 3, 4, None]
    assert list(leaves(5)) == [5]
    assert list(instances([1, "a", (2.0, [True])], int)) == [1, True]


def test_kinds_of_containers_stay():
    tree = {"a": [1, (2, "x")], "b": Pair(3, 4)}
    assert map_instances(tree, int, lambda n: n + 1) == {"a": [2, (3, "x")], "b": Pair(4, 5)}
    assert isinstance(map_instances(tree, int, str)["b"], Pair)


def test_results_of_torch_keep_their_names():
    result = map_instances(torch.sort(torch.tensor([2.0, 1.0])), torch.Tensor, torch.Tensor.neg)
    assert result.values.tolist() == [-1.0, -2.0]
    assert result.indices.tolist() == [-1, 0]


def test_a_tensor_is_not_searched():
    tensor = torch.arange(3)
    assert next(leaves([tensor])) is tensor
    assert map_instances(tensor, float, str) is tensor
