"""``BackendBench.enable`` and ``disable``."""

from __future__ import annotations

import BackendBench
import pytest
import torch
from BackendBench.scripts.create_watermarked_operators import create_watermarked_operators, get_operator_watermark_value

from opforge.errors import OpforgeError

X = torch.tensor([-1.0, 0.0, 1.0])
relu, leaky_relu = torch.ops.aten.relu.default, torch.ops.aten.leaky_relu.default


@pytest.fixture
def marked(tmp_path):
    """Return a function that makes a folder of watermarked kernels."""

    def make(*folders):
        root = tmp_path / folders[0]
        for folder in folders:
            (root / folder).mkdir(parents=True)
        create_watermarked_operators(root, use_unique_watermarks=True)
        return root

    yield make
    BackendBench.disable()


def test_kernels_are_in_place_until_they_are_disabled(marked):
    mark = get_operator_watermark_value("add.Tensor")
    BackendBench.enable(marked("add__Tensor"), dispatch_key="CPU")
    assert torch.ops.aten.add.Tensor(X, X).tolist() == [mark] * 3
    assert relu(X).tolist() == [0, 0, 1]
    BackendBench.disable()
    assert torch.ops.aten.add.Tensor(X, X).tolist() == [-2, 0, 2]


def test_the_context_manager_removes_its_own_kernels_alone(marked):
    outer, inner = marked("relu__default"), marked("leaky_relu__default")
    BackendBench.enable(outer, dispatch_key="CPU")
    with pytest.raises(ValueError, match="inside"), BackendBench.BackendBench.enable(inner, dispatch_key="CPU"):
        assert leaky_relu(X).tolist() == [get_operator_watermark_value("leaky_relu.default")] * 3
        assert relu(X).tolist() == [get_operator_watermark_value("relu.default")] * 3
        raise ValueError("inside")
    assert leaky_relu(X).tolist() == pytest.approx([-0.01, 0, 1])
    assert relu(X).tolist() == [get_operator_watermark_value("relu.default")] * 3


def test_what_cannot_be_enabled_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OpforgeError, match="there is no kernel directory 'generated_kernels'"):
        BackendBench.enable(dispatch_key="CPU")
    with pytest.raises(OpforgeError, match="dispatch key 'Meta' cannot be enabled; allowed: CPU, CUDA"):
        BackendBench.enable(tmp_path, dispatch_key="Meta")
    with pytest.raises(OpforgeError, match="namespace 'mine' cannot be enabled; allowed: aten"):
        BackendBench.enable(tmp_path, namespace="mine")
    with pytest.raises(AttributeError, match="has no attribute 'enables'"):
        _ = BackendBench.enables
