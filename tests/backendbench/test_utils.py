"""Names of folders, calls as text, errors."""

from __future__ import annotations

import math

import pytest
import torch
from BackendBench.opregistry import get_operator
from BackendBench.utils import (
    compute_errors,
    deserialize_args,
    extract_operator_name,
    folder_name_to_op_name,
    op_name_to_folder_name,
    serialize_args,
    uses_cuda_stream,
)

from opforge.errors import CaseSyntaxError


@pytest.mark.parametrize("op", ["add.Tensor", "add_.Tensor", "_softmax.default", "nn.functional.relu"])
def test_folders_and_operators_name_each_other(op):
    assert folder_name_to_op_name(op_name_to_folder_name(op)) == op


def test_an_operator_is_found_by_its_name():
    assert extract_operator_name("torch.ops.aten.add.Tensor") == "add.Tensor"
    assert get_operator("add.Tensor") is torch.ops.aten.add.Tensor
    assert get_operator(torch.ops.aten.relu.default) is torch.ops.aten.relu.default
    with pytest.warns(UserWarning, match="did you mean 'relu'"):
        assert get_operator("rellu") is None


def test_a_call_is_text_and_back():
    call = (torch.ones(3, 2, dtype=torch.bfloat16).t(), [torch.ones(4, dtype=torch.bool), 1], "x", -1.5)
    text = serialize_args(call, {"dtype": torch.float16, "dim": None})
    assert text == "((T([2, 3], bf16, [1, 2]), [T([4], b8), 1], 'x', -1.5,), {'dtype': torch.float16, 'dim': None})"
    args, kwargs = deserialize_args(text)
    assert (args[0].shape, args[0].stride(), args[0].dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert args[2:] == ("x", -1.5)
    assert kwargs == {"dtype": torch.float16, "dim": None}
    assert deserialize_args("((inf,), {})")[0] == (math.inf,)


def test_text_is_parsed_and_never_run():
    with pytest.raises(CaseSyntaxError, match="is not a value"):
        deserialize_args("((__import__('os').getpid(),), {})")


def test_errors():
    left, right = torch.tensor([1.0, 4.0]), torch.tensor([1.5, 4.0])
    assert compute_errors(left, right) == (0.5, pytest.approx(0.5))
    assert compute_errors([left, 1], [right, 1]) == (0.5, pytest.approx(0.5))
    assert compute_errors(left, right[:1]) == (None, None)


def _makes_a_stream():
    return torch.cuda.Stream()


def test_streams_are_seen_in_the_source():
    assert uses_cuda_stream(_makes_a_stream)
    assert not uses_cuda_stream(test_errors)
    assert not uses_cuda_stream(torch.add)
