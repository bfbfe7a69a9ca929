"""How tensors lie in memory, told apart as far as kernels get it wrong; and that forms of cases have the layouts whose names they bear."""

from __future__ import annotations

import pytest
import torch

from opforge.cases.variant_shapes import LAYOUT_VARIANT_NAMES
from opforge.cases.variants import VARIANTS, CallTensors
from opforge.runtime.layouts import layout_names

X = torch.zeros(6, 8)
B = torch.zeros(2, 4, 6, 8)
KNOWN = {
    "contiguous": [X, X[1:], X[:, :1].contiguous(), torch.zeros(()), X[:1, :5], B[:, :1].contiguous()],
    "transposed": [X.t(), B.permute(0, 3, 2, 1)[:1], B.transpose(1, 2)],
    "channels_last": [B.contiguous(memory_format=torch.channels_last)],
    "pitched": [X[:, :5], X[::2], B[:, :3], B[:, :, :, :7], B[:, ::2], torch.zeros(9)[:8].as_strided((2, 3), (4, 1))],
    "strided": [X[:, ::2], X[:, 1], X[:, :5:2], B[..., ::3], torch.zeros(9)[::2]],
    "permuted": [X[:, :5].t(), X[:, ::2].t(), B.transpose(1, 2)[..., :5], B[:, :, :3].transpose(2, 3)],
    "overlapping": [torch.zeros(9).unfold(0, 4, 1), torch.zeros(9).as_strided((3, 3), (2, 2))],
    "expanded": [X[:1].expand(6, 8), B[:, :1].expand(2, 4, 6, 8)],
    "expanded_last": [X[:, :1].contiguous().expand(6, 8), torch.zeros(()).expand(4)],
    "empty": [X[:0], X[:, :0].t()],
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor"), [(name, t) for name, found in KNOWN.items() for t in found])
def test_a_layout_has_its_name(name, tensor):
    assert name in layout_names(tensor.shape, tensor.stride())


def test_an_expanded_tensor_is_what_its_own_elements_are_besides():
    assert layout_names((6, 8, 3), (8, 1, 0)) == {"expanded_last"}
    assert layout_names((6, 8, 3), (16, 2, 0)) == {"expanded_last", "strided"}
    assert layout_names((4, 6, 5), (0, 8, 1)) == {"expanded", "pitched"}


@pytest.mark.parametrize("shape", [(3, 4), (5,), (3, 1), (1, 4), (2, 3, 4), (2, 3, 4, 5), (1, 1)])
@pytest.mark.parametrize("name", sorted(LAYOUT_VARIANT_NAMES - {"offset"}))
def test_a_form_has_the_layout_that_a_proof_will_claim(name, shape):
    made = VARIANTS[name](CallTensors((torch.randn(shape),)))
    if made is not None:
        assert layout_names(made[0].shape, made[0].stride()) == {name}


def test_gaps_between_rows_are_poison():
    (made,) = VARIANTS["pitched"](CallTensors((torch.arange(12.0).reshape(3, 4),)))
    whole = made.as_strided((3, 7), (7, 1), 0)
    assert whole[:, 4:].isnan().all()
    assert torch.equal(made, torch.arange(12.0).reshape(3, 4))
