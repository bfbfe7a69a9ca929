"""No formula counts more than an answer needs: inputs that change nothing, writes that ATen leaves out, operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from opforge.judge.facts import OPERATOR_FACTS
from opforge.judge.roofline.bound import Cost, cost
from opforge.judge.roofline.tensor_memory import distinct_bytes
from opforge.ops import table
from opforge.runtime.trees import instances, map_instances

Call = Callable[[], tuple[Any, ...]]


def r(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values)


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
MASK = torch.tensor([[True, False, False], [True, True, False]])

CALLS: list[tuple[str, Call]] = [
    ("relu.default", lambda: (r(3, 4),)),
    ("add.Tensor", lambda: (r(3, 4), r(4))),
    ("add.Tensor", lambda: (r(3, 1).expand(3, 4), r(4))),
    ("mul_.Tensor", lambda: (r(3, 4), r(3, 4))),
    ("where.self", lambda: (MASK, r(2, 3), r(()))),
    ("where.self", lambda: (MASK, r(2, 3), r(2, 3))),
    ("masked_fill.Scalar", lambda: (r(2, 3), MASK, 1.0)),
    ("masked_fill_.Tensor", lambda: (r(2, 3), MASK, r(()))),
    ("masked_scatter.default", lambda: (r(2, 3), MASK, r(9))),
    ("masked_scatter_.default", lambda: (r(2, 3), MASK, r(9))),
    ("masked_select.default", lambda: (r(2, 3), MASK)),
    ("_foreach_add_.Scalar", lambda: ([r(3), r(5)], 1.0)),
    ("_foreach_lerp_.Scalar", lambda: ([r(3)], [r(3)], 0.5)),
    ("_fused_adam_.default", lambda: ([r(4)], [r(4)], [r(4)], [r(4)], [], [r(())], ADAM)),
    ("_fused_adamw_.default", lambda: ([r(4)], [r(4)], [r(4)], [r(4)], [], [r(())], ADAM)),
    ("_fused_sgd_.default", lambda: ([r(4)], [r(4)], [r(4)], {**SGD, "is_first_step": False})),
    ("_fused_sgd_.default", lambda: ([r(4)], [r(4)], [r(4)], {**SGD, "is_first_step": True})),
    ("sum.dim_IntList", lambda: (r(3, 4), [1])),
    ("amax.default", lambda: (r(3, 4), [0])),
    ("sort.default", lambda: (r(3, 4),)),
    ("topk.default", lambda: (r(3, 4), 2)),
    ("cumsum.default", lambda: (r(3, 4), 0)),
    ("trace.default", lambda: (r(3, 4),)),
    ("fill_diagonal_.default", lambda: (r(3, 4), 9.0)),
    ("_softmax.default", lambda: (r(3, 4), 1, False)),
    ("_log_softmax_backward_data.default", lambda: (r(3, 4), r(3, 4), 1, torch.float32)),
    ("native_layer_norm.default", lambda: (r(2, 3), [3], r(3), r(3), 1e-5)),
    ("native_layer_norm_backward.default", lambda: (r(2, 3), r(2, 3), [3], r(2, 1), r(2, 1), r(3), r(3), [True, True, True])),
    ("native_layer_norm_backward.default", lambda: (r(2, 3), r(2, 3), [3], r(2, 1), r(2, 1), r(3), r(3), [False, True, False])),
    ("_native_batch_norm_legit_no_training.default", lambda: (r(2, 3), r(3), r(3), r(3), r(3), 0.1, 1e-5)),
    ("native_batch_norm.default", lambda: (r(2, 3), r(3), r(3), r(3), r(3), False, 0.1, 1e-5)),
    ("native_batch_norm_backward.default",
     lambda: (r(2, 3), r(2, 3), r(3), r(3), r(3), r(3), r(3), True, 1e-5, [True, True, True])),
    ("native_batch_norm_backward.default",
     lambda: (r(2, 3), r(2, 3), r(3), r(3), r(3), r(3), r(3), False, 1e-5, [True, False, True])),
    ("_weight_norm_interface.default", lambda: (r(3, 4), r(3, 1))),
    ("nll_loss_forward.default", lambda: (r(3, 4), indices(1, 1, -100), r(4), 1, -100)),
    ("nll_loss_backward.default", lambda: (r(()), r(3, 4), indices(1, 1, -100), r(4), 1, -100, r(()))),
    ("nll_loss_backward.default", lambda: (r(3), r(3, 4), indices(1, 1, -100), r(4), 0, -100, r(()))),
    ("log_sigmoid_backward.default", lambda: (r(3), r(3), r(3))),
    ("embedding.default", lambda: (r(9, 3), indices(2, 2, 5))),
    ("embedding_dense_backward.default", lambda: (r(4, 3), indices(2, 2, 0, 5), 9, 0, False)),
    ("_embedding_bag_forward_only.default", lambda: (r(9, 3), indices(2, 2, 5), indices(0, 2))),
    ("index_select.default", lambda: (r(3, 9), 1, indices(2, 2, 5))),
    ("gather.default", lambda: (r(3, 9), 1, torch.tensor([[1, 1], [2, 3], [0, 0]]))),
    ("take.default", lambda: (r(3, 9), indices(1, 1, 9))),
    ("index.Tensor", lambda: (r(3, 9), [None, indices(1, 1, 8)])),
    ("index.Tensor", lambda: (r(2, 3), [MASK])),
    ("scatter.src", lambda: (r(9), 0, indices(1, 1, 8), r(4))),
    ("scatter_.src", lambda: (r(9), 0, indices(1, 1, 8), r(4))),
    ("scatter_add.default", lambda: (r(9), 0, indices(1, 1, 8), r(4))),
    ("scatter_add_.default", lambda: (r(9), 0, indices(1, 1, 8), r(4))),
    ("index_add_.default", lambda: (r(9, 2), 0, indices(1, 1, 8), r(3, 2))),
    ("index_put.default", lambda: (r(2, 3), [MASK], r(()))),
    ("index_put_.default", lambda: (r(9, 2), [indices(1, 1, 8)], r(3, 2), True)),
    ("index_copy.default", lambda: (r(9, 2), 0, indices(1, 8), r(2, 2))),
    ("index_fill.int_Scalar", lambda: (r(9, 2), 0, indices(1, 1, 8), 9.0)),
    ("clone.default", lambda: (r(3, 4),)),
    ("cat.default", lambda: ([r(3, 4), r(1, 4)],)),
    ("slice_copy.Tensor", lambda: (r(9, 2), 0, 3, 5)),
    ("slice_scatter.default", lambda: (r(9, 2), r(2, 2), 0, 3, 5)),
    ("constant_pad_nd.default", lambda: (r(3, 4), [1, 1])),
    ("tril.default", lambda: (r(4, 4),)),
    ("triu_.default", lambda: (r(4, 4),)),
    ("im2col.default", lambda: (r(1, 1, 5, 5), [2, 2], [1, 1], [0, 0], [3, 3])),
    ("max_pool2d_with_indices.default", lambda: (r(1, 1, 5, 5), [1, 1], [2, 2])),
    ("max_pool2d_with_indices_backward.default",
     lambda: (r(1, 1, 2, 2), r(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, torch.tensor([[[[0, 2], [8, 10]]]]))),
    ("avg_pool2d.default", lambda: (r(1, 1, 5, 5), [2, 2])),
    ("avg_pool2d_backward.default", lambda: (r(1, 1, 2, 2), r(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None)),
    ("_adaptive_avg_pool2d_backward.default", lambda: (r(1, 1, 2, 2), r(1, 1, 4, 4))),
    ("reflection_pad1d_backward.default", lambda: (r(1, 6), r(1, 4), [1, 1])),
    ("upsample_nearest2d.default", lambda: (r(1, 1, 6, 6), [2, 2])),
    ("upsample_bilinear2d.default", lambda: (r(1, 1, 8, 8), [2, 2], False)),
    ("upsample_nearest1d.default", lambda: (r(1, 1, 4), [6], 1.7)),
    ("upsample_linear1d.default", lambda: (r(1, 1, 4), [2], True)),
    ("as_strided_copy.default", lambda: (r(16), [2, 2, 2], [1, 1, 1])),
    ("convolution.default", lambda: (r(1, 1, 4), r(1, 1, 1), None, [2], [2], [1], True, [1], 1)),
    ("grid_sampler_2d.default", lambda: (r(1, 1, 4, 4), r(1, 1, 2, 2) - 1, 0, 0, False)),
    ("mm.default", lambda: (r(3, 4), r(4, 2))),
    ("mm.default", lambda: (r(1, 4).expand(3, 4), r(4, 2))),
    ("addmm.default", lambda: (r(2), r(3, 4), r(4, 2))),
    ("addr.default", lambda: (r(3, 4), r(3), r(4), {"beta": 0})),
    ("bmm.default", lambda: (r(1, 3, 4).expand(2, 3, 4), r(2, 4, 2))),
    ("baddbmm.default", lambda: (r(2, 3, 2), r(2, 3, 4), r(2, 4, 2), {"beta": 0})),
    ("convolution.default", lambda: (r(1, 1, 3, 3), r(2, 1, 2, 2), r(2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ("convolution.default", lambda: (r(1, 2, 3, 3), r(2, 2, 1, 1), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)),
    ("convolution.default", lambda: (r(1, 1, 2, 2), r(2, 1, 3, 3), None, [1, 1], [3, 3], [3, 3], False, [0, 0], 1)),
    ("convolution.default", lambda: (r(2, 4, 5), r(4, 1, 2), None, [1], [0], [1], False, [0], 4)),
    ("convolution.default", lambda: (r(1, 2, 3), r(2, 3, 2), None, [2], [0], [1], True, [0], 1)),
    ("convolution_backward.default",
     lambda: (r(1, 1, 2, 2), r(1, 2, 3, 3), r(1, 2, 1, 1), [1], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])),
    ("convolution_backward.default",
     lambda: (r(1, 1, 3, 3), r(1, 1, 3, 3), r(1, 1, 3, 3), [1], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])),
    ("scaled_dot_product_attention.default", lambda: (r(1, 1, 3, 4), r(1, 1, 3, 4), r(1, 1, 3, 4))),
    ("scaled_dot_product_attention.default", lambda: (r(1, 1, 2, 4), r(1, 1, 4, 4), r(1, 1, 4, 4), None, 0.0, True)),
    ("scaled_dot_product_attention.default", lambda: (r(1, 1, 2, 4), r(1, 1, 3, 4), r(1, 1, 3, 4), MASK)),
]  # fmt: skip
IDS = [f"{number}-{op}" for number, (op, _) in enumerate(CALLS)]


def split(arguments: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional arguments and those by name, which a mapping at the end holds."""
    named = isinstance(arguments[-1], dict)
    return list(arguments[:-1] if named else arguments), dict(arguments[-1]) if named else {}


def copied(tree: Any) -> Any:
    """Return arguments in memory of their own, with the same strides."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    return map_instances(tree, torch.Tensor, copy)


def contents(tensors: list[torch.Tensor]) -> list[list[bytes]]:
    """Return the bytes of each element in the memory of tensors."""
    flat = [bytes(t.untyped_storage()) for t in tensors]
    sizes = [t.element_size() for t in tensors]
    return [[b[i : i + n] for i in range(0, len(b), n)] for b, n in zip(flat, sizes, strict=True)]


Outcome = tuple[list[list[bytes]], list[list[bytes]]]
"""The elements of new results, and those of the arguments after the call."""


def outcome(op: str, arguments: tuple[Any, ...]) -> Outcome:
    args, kwargs = split(copied(arguments))
    given = list(instances((args, kwargs), torch.Tensor))
    result = overload(op)(*args, **kwargs)
    new = [t.contiguous() for t in instances(result, torch.Tensor) if not any(t is other for other in given)]
    return contents(new), contents(given)


def overload(op: str) -> Callable[..., Any]:
    facts = table().get(op)
    assert facts is not None, op
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, facts.base), facts.overload)
    return function


def counted(op: str, arguments: tuple[Any, ...]) -> Cost:
    args, kwargs = split(copied(arguments))
    facts = table().get(op)
    assert facts is not None
    return cost(facts, args, kwargs, overload(op)(*args, **kwargs))


def needed_bytes(op: str, arguments: tuple[Any, ...]) -> int:
    """Return the bytes of the inputs that change the answer if they change.

    An element that only keeps what was in it is not needed. Integers and masks are taken to be needed.
    """
    tensors = list(instances(split(arguments), torch.Tensor))
    before = contents(tensors)
    right, right_after = outcome(op, arguments)
    needed = distinct_bytes([t for t in tensors if not t.is_floating_point()])
    for number, tensor in enumerate(tensors):
        memory = torch.empty(0).set_(tensor.untyped_storage()) if tensor.is_floating_point() else torch.empty(0)
        for place, value in enumerate(memory.tolist()):
            memory[place] = float("nan")
            put = contents([tensor])[0][place]
            found, after = outcome(op, arguments)
            memory[place] = value
            kept = right_after[number][place] == before[number][place] and after[number][place] == put
            after[number][place] = right_after[number][place] if kept else after[number][place]
            needed += 4 * ((found, after) != (right, right_after))
    return needed


@pytest.mark.parametrize(("op", "make"), CALLS, ids=IDS)
def test_no_more_bytes_are_counted_than_an_answer_needs(op, make):
    torch.manual_seed(1)
    arguments = make()
    made = counted(op, arguments)
    assert made.moved_bytes - made.written_bytes <= needed_bytes(op, arguments)
    assert made.required_input_bytes <= made.required_bytes <= made.moved_bytes

    new, after = outcome(op, arguments)
    written = sum(len(element) for tensor in new for element in tensor)
    for tensor, now in zip(contents(list(instances(split(arguments), torch.Tensor))), after, strict=True):
        written += sum(len(b) for a, b in zip(tensor, now, strict=True) if a != b)
    assert made.written_bytes <= written


def test_each_formula_of_single_operators_is_among_these_calls():
    used = {facts.formula for op, _ in CALLS if (facts := OPERATOR_FACTS.get(packet(op))) is not None}
    known = {facts.formula for facts in OPERATOR_FACTS.values()}
    apart = {"linear_backward", "batch_norm", "fetched", "embedding_bag"}
    missing = {f.__name__ for f in known - used if f is not None and f.__module__.endswith("formulas")} - apart
    assert missing <= {"formula"}  # factories make one function for each operator


def packet(op: str) -> str:
    facts = table().get(op)
    assert facts is not None
    return facts.packet


PRODUCTS = [row for row in CALLS if packet(row[0]) in ("mm", "addmm", "bmm", "baddbmm", "convolution")]


@pytest.mark.parametrize(("op", "make"), PRODUCTS, ids=[f"{number}-{op}" for number, (op, _) in enumerate(PRODUCTS)])
def test_no_more_operations_are_counted_than_torch_counts(op, make):
    args, kwargs = split(make())
    result = overload(op)(*args, **kwargs)
    by_torch = flop_registry[getattr(torch.ops.aten, packet(op))](*args, out_val=result)
    made = counted(op, make())
    assert 0 < made.flops <= by_torch
    if packet(op) != "convolution" and not _repeats_itself(args):
        assert made.flops == by_torch


def _repeats_itself(args: list[Any]) -> bool:
    """Whether all rows of a factor are one row in memory."""
    return any(t.dim() == 2 and t.stride(0) == 0 for t in instances(args, torch.Tensor))


def test_attention_counts_no_more_operations_than_torch():
    query, key = r(1, 2, 5, 8), r(1, 2, 7, 8)
    by_torch = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention](query, key, key, out_val=(query, None))
    flops = [
        counted("scaled_dot_product_attention.default", (query, key, key, None, dropout, causal)).flops
        for dropout, causal in ((0.0, False), (0.0, True), (0.5, False))
    ]
    assert flops == [by_torch, by_torch * 15 // 35, by_torch * 3 // 4]
