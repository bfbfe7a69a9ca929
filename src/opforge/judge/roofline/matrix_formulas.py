"""Cost of matrix products, convolutions and attention, with operations as torch counts them."""

from __future__ import annotations

import math
from typing import Any

import torch

from opforge.judge.roofline.costed_call import CostedCall, matmul_kind, real_flops
from opforge.judge.roofline.formulas import CallWork, Formula, argument_bytes, default_work, read_arguments, writes_all
from opforge.judge.roofline.tensor_memory import distinct_elements

_MAX_FLOPS_REDUCTION = 2
"""Factor by which a clever product may take fewer operations than are counted.

Strassen's algorithm reaches it after five levels.
"""


def product(left_name: str, right_name: str) -> Formula:
    """Matrix products of two arguments; the left one's last dimension is summed over."""

    def formula(call: CostedCall) -> CallWork:
        left, right = call.tensors(left_name)[0], call.tensors(right_name)[0]
        names = [n for n in read_arguments(call) if n != "self" or n == left_name or call.number("beta", 1) != 0]
        if call.number("alpha", 1) == 0:
            names = [n for n in names if n not in (left_name, right_name)]
            return CallWork(
                argument_bytes(call, names),
                call.max_elements,
                matmul_kind(left),
                required_inputs=tuple(call.tensors(*names)),
            )
        flops = real_flops(left, _torch_flops(call) or _product_operations(call, left))
        without_overlap = all(distinct_elements(t) == t.numel() for t in (left, right))
        sure = tuple(call.tensors(*names)) if left.numel() and right.numel() else ()
        return CallWork(
            argument_bytes(call, names),
            flops,
            matmul_kind(left),
            required_inputs=sure,
            required_flops=flops // _MAX_FLOPS_REDUCTION if without_overlap else 0,
        )

    return formula


def _product_operations(call: CostedCall, left: torch.Tensor) -> int:
    """Return the operations of a product that sums over the left factor's last dimension.

    ``addbmm`` sums over batches too.
    """
    length = left.shape[-1] if left.dim() else 1
    batches = left.shape[0] if call.op.packet == "addbmm" else 1
    return int(2 * call.outputs[0].numel() * length * batches)


def _torch_flops(call: CostedCall, packet: str = "") -> int:
    """Return the operations by torch's counter; 0 where it has no formula that takes the call."""
    from torch.utils.flop_counter import flop_registry  # slow to import; few judges time products

    formula = flop_registry.get(getattr(torch.ops.aten, packet or call.op.packet, None))
    if formula is None:
        return 0
    positional: list[Any] = []
    for argument in call.op.arguments:
        if argument.kwarg_only or argument.name not in call.bound_arguments:
            break
        positional.append(call.bound_arguments[argument.name])
    try:
        return int(formula(*positional, out_val=call.result))
    except (AssertionError, TypeError, ValueError, IndexError):  # unforeseen shapes, such as batches of 0
        return 0


def convolution(call: CostedCall) -> CallWork:
    names = read_arguments(call)
    source, weight = call.tensors("input", "self")[0], call.tensors("weight")[0]
    transposed = call.op.packet.startswith("conv_transpose") or "transpose" in call.op.packet
    weight_positions = source if call.bound_arguments.get("transposed", transposed) else call.outputs[0]
    counted = (
        _torch_flops(call) if call.op.packet in ("convolution", "_convolution") else 0
    )  # it misreads the arguments of others
    flops = counted or 2 * weight_positions.numel() * math.prod(weight.shape[1:])
    steps = [*_numbers(call.bound_arguments.get("stride")), *_numbers(call.bound_arguments.get("dilation"))]
    sure = (source,) if weight_positions is not source and all(step == 1 for step in steps) else ()
    return CallWork(argument_bytes(call, names), real_flops(source, flops), matmul_kind(source), required_inputs=sure)


def _numbers(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value] if isinstance(value, int) else []


def convolution_backward(call: CostedCall) -> CallWork:
    """Gradients of a convolution: each of the two costs as much as the convolution.

    Torch's counter forgets groups here.
    """
    grad, source, weight = (call.tensors(n)[0] for n in ("grad_output", "input", "weight"))
    mask = call.bound_arguments["output_mask"]
    names = ["grad_output", *(["weight"] if mask[0] else []), *(["input"] if mask[1] else [])]
    weight_positions = source if call.bound_arguments["transposed"] else grad
    flops = 2 * weight_positions.numel() * math.prod(weight.shape[1:]) * sum(mask[:2]) + grad.numel() * bool(mask[2])
    sure = (grad,) if mask[2] else ()
    return CallWork(argument_bytes(call, names), real_flops(source, flops), matmul_kind(source), required_inputs=sure)


def linear_backward(call: CostedCall) -> CallWork:
    source, grad, weight = (call.tensors(n)[0] for n in ("self", "grad_output", "weight"))
    mask = call.bound_arguments["output_mask"]
    names = ["grad_output", *(["weight"] if mask[0] else []), *(["self"] if mask[1] else [])]
    flops = 2 * grad.numel() * weight.shape[-1] * sum(mask[:2]) + grad.numel() * bool(mask[2])
    return CallWork(
        argument_bytes(call, names),
        real_flops(source, flops),
        matmul_kind(source),
        required_inputs=tuple(call.tensors(*names)),
    )


def attention(call: CostedCall) -> CallWork:
    """Attention, forward and backward.

    With a mask, dropout or a causal order, some of the inputs may not be needed.
    """
    query = call.tensors("query")[0]
    packet = call.op.packet
    flops = _torch_flops(call, call.facts.flops_like) or _attention_operations(call)
    if not flops:
        return default_work(call)
    names = read_arguments(call)
    causal = bool(call.number("is_causal", 0))
    if causal and "scaled_dot_product" in packet:
        flops = int(flops * _causal_share(query.shape[-2], call.tensors("key")[0].shape[-2]))
    masked = call.tensors("attn_mask", "attn_bias", "bias") or call.number("dropout_p", 0.0)
    reads_all = not causal and not masked and "backward" not in packet
    sure = tuple(call.tensors("query", "key", "value")) if reads_all else ()
    return CallWork(
        argument_bytes(call, names),
        flops,
        matmul_kind(query),
        required_inputs=sure,
        requires_all_writes=writes_all(call),
    )


def _attention_operations(call: CostedCall) -> int:
    """Return the operations of attention with any batch dimensions; 0 for its gradients."""
    if not call.facts.flops_like or "backward" in call.op.packet:
        return 0
    query, key, value = (call.tensors(n)[0] for n in ("query", "key", "value"))
    rows = math.prod(query.shape[:-1])
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _causal_share(queries: int, keys: int) -> float:
    """Return the share of pairs needed where a query sees the keys up to its own position."""
    needed_pairs = sum(min(row + 1, keys) for row in range(queries))
    return needed_pairs / (queries * keys) if queries and keys else 0.0
