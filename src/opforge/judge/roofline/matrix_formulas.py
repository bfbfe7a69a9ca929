"""Cost of matrix products, convolutions and attention: the fewest operations of known algorithms."""

from __future__ import annotations

import math
from typing import Any

import torch

from opforge.judge.roofline.contents import has_contents
from opforge.judge.roofline.costed_call import (
    CostedCall,
    convolution_kind,
    matmul_kind,
    real_flops,
    share_of_bytes,
)
from opforge.judge.roofline.formulas import CallWork, Formula, argument_bytes, default_work, read_arguments, writes_all
from opforge.judge.roofline.tensor_memory import distinct_bytes, distinct_elements
from opforge.judge.roofline.windows import WindowUse, per_dimension, window_use

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
                call.outputs[0].numel(),
                call.arithmetic_kind(),
                required_inputs=tuple(call.tensors(*names)),
            )
        flops = real_flops(left, _product_operations(call, left))
        without_overlap = all(distinct_elements(t) == t.numel() for t in (left, right))
        if any(_repeats(*pair) for pair in ((left, right), (right, left))):  # one row in memory gives one result
            flops = min(flops, 2 * max(distinct_elements(left), distinct_elements(right), call.outputs[0].numel()))
        sure = tuple(call.tensors(*names)) if left.numel() and right.numel() else ()
        return CallWork(
            argument_bytes(call, names),
            flops,
            matmul_kind(left),
            required_inputs=sure,
            required_flops=flops // _MAX_FLOPS_REDUCTION if without_overlap else 0,
        )

    return formula


def _repeats(factor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a factor repeats itself in memory, other than for each batch of the other factor."""
    for dim in range(-min(factor.dim(), other.dim()), -2):
        if factor.stride(dim) == 0 and other.stride(dim) != 0:
            factor = factor.narrow(dim, 0, 1)
    return bool(distinct_elements(factor) != factor.numel())


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
    source, weight = call.tensors("input", "self")[0], call.tensors("weight")[0]
    transposed = bool(call.bound_arguments.get("transposed", "transpose" in call.op.packet))
    use = _convolution_use(call, source, weight, call.outputs[0], transposed=transposed)
    flops = _convolution_flops(source, weight, use)
    rest = [n for n in read_arguments(call) if not any(t is source or t is weight for t in call.tensors(n))]
    read_source = share_of_bytes(source, use.window_share if transposed else use.element_share)
    steps = [*_numbers(call.bound_arguments.get("stride")), *_numbers(call.bound_arguments.get("dilation"))]
    sure = (source,) if not transposed and all(step == 1 for step in steps) else ()
    return CallWork(
        argument_bytes(call, rest) + read_source + share_of_bytes(weight, use.tap_share),
        real_flops(source, flops),
        convolution_kind(source),
        required_inputs=sure,
    )


def _convolution_use(
    call: CostedCall, source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, *, transposed: bool
) -> WindowUse:
    """Return what the windows use: of the input, or of the result of a transposed convolution."""
    dimensions = weight.dim() - 2
    below, above = (result, source) if transposed else (source, result)
    taps = weight.shape[2:]
    steps = per_dimension(call.bound_arguments.get("stride"), dimensions, 1)
    spacings = per_dimension(call.bound_arguments.get("dilation"), dimensions, 1)
    padding = call.bound_arguments.get("padding")
    if padding == "same":
        paddings = [spacing * (n - 1) // 2 for spacing, n in zip(spacings, taps, strict=True)]
    else:
        paddings = per_dimension(padding, dimensions, 0)
    lengths, windows = (t.shape[t.dim() - dimensions :] for t in (below, above))
    return window_use(lengths, windows, taps, steps, paddings, spacings)


def _convolution_flops(source: torch.Tensor, weight: torch.Tensor, use: WindowUse) -> int:
    """Return the fewest operations of a convolution, or of one of its two gradients.

    For each pair of channels, no bilinear algorithm multiplies less often than the input, the result or the filter
    has elements: every one of them must matter. Winograd's and Fourier's methods come near. Each product is added.
    """
    batches = source.shape[0] if source.dim() == weight.dim() else 1
    pairs_of_channels = weight.shape[0] * weight.shape[1]
    return int(2 * batches * pairs_of_channels * min(use.pairs, max(use.elements, use.taps, use.windows)))


def _numbers(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value] if isinstance(value, int) else []


def convolution_backward(call: CostedCall) -> CallWork:
    """Gradients of a convolution: each of the two costs as much as the convolution."""
    grad, source, weight = (call.tensors(n)[0] for n in ("grad_output", "input", "weight"))
    wants_input, wants_weight, wants_bias = call.bound_arguments["output_mask"]
    transposed = bool(call.bound_arguments["transposed"])
    use = _convolution_use(call, source, weight, grad, transposed=transposed)
    flops = _convolution_flops(source, weight, use) * (wants_input + wants_weight) + grad.numel() * wants_bias
    read = share_of_bytes(grad, 1.0 if wants_bias else use.element_share if transposed else use.window_share)
    read += share_of_bytes(weight, use.tap_share) if wants_input else 0
    read += share_of_bytes(source, use.window_share if transposed else use.element_share) if wants_weight else 0
    return CallWork(
        read,
        real_flops(source, flops),
        convolution_kind(source),
        required_inputs=(grad,) if wants_bias else (),
    )


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


_MASK_ARGUMENTS = ("attn_mask", "attn_bias", "bias")
_RECOMPUTABLE = ("out", "logsumexp")
"""Inputs of gradients that follow from the others."""


def attention(call: CostedCall) -> CallWork:
    """Attention, forward and backward: of pairs of queries and keys only those that are not masked.

    With a mask, dropout or a causal order, some of the inputs may not be needed.
    """
    query = call.tensors("query")[0]
    packet = call.op.packet
    flops = _torch_flops(call, call.facts.flops_like) or _attention_operations(call)
    if not flops:
        return default_work(call)
    pair_share, key_share = _needed_shares(call)
    dropped = float(call.number("dropout_p", 0.0))
    backward = "backward" in packet
    names = [n for n in read_arguments(call) if n not in ("key", "value") and not (backward and n in _RECOMPUTABLE)]
    keys = sum(share_of_bytes(t, key_share) for t in call.tensors("key", "value"))
    if distinct_bytes(call.tensors("query", "key", "value")) < sum(map(_bytes, call.tensors("query", "key", "value"))):
        names, keys = [*names, "key", "value"], 0  # parts of one tensor
    reads_all = key_share == pair_share == 1 and not call.tensors(*_MASK_ARGUMENTS) and not dropped and not backward
    sure = tuple(call.tensors("query", "key", "value")) if reads_all else ()
    return CallWork(
        argument_bytes(call, names) + keys,
        int(flops * pair_share * (1 - dropped / 2)),  # what is dropped takes no part in the second product
        matmul_kind(query),
        required_inputs=sure,
        requires_all_writes=writes_all(call),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return distinct_bytes([tensor])


def _attention_operations(call: CostedCall) -> int:
    """Return the operations of attention with any batch dimensions; 0 for its gradients."""
    if not call.facts.flops_like or "backward" in call.op.packet:
        return 0
    query, key, value = (call.tensors(n)[0] for n in ("query", "key", "value"))
    rows = math.prod(query.shape[:-1])
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _needed_shares(call: CostedCall) -> tuple[float, float]:
    """Return the shares of pairs and of keys that no implementation can leave out."""
    length_dim = -2 if "scaled_dot_product" in call.op.packet else -3
    queries, keys = (call.tensors(n)[0].shape[length_dim] for n in ("query", "key"))
    if not queries or not keys:
        return 0.0, 0.0
    windows = [call.bound_arguments.get(n) for n in ("window_size", "window_size_left", "window_size_right")]
    if any(isinstance(w, int) and w >= 0 for w in windows):
        return 0.0, 0.0
    pairs, used_keys = 1.0, 1.0
    if call.number("is_causal", 0) or call.number("custom_mask_type", 0):
        pairs = _causal_share(queries, keys)
        used_keys = min(1.0, queries / keys)
        if length_dim == -3:  # the last query may see all keys instead, and several sequences may follow each other
            several = bool(call.tensors("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k"))
            pairs = 0.0 if several else min(pairs, _causal_share(keys, queries) if queries > keys else pairs)
            used_keys = 0.0 if several else used_keys
    for mask in call.tensors(*_MASK_ARGUMENTS):
        of_pairs, of_keys = _mask_shares(mask)
        pairs, used_keys = max(0.0, pairs + of_pairs - 1), max(0.0, used_keys + of_keys - 1)
    return pairs, used_keys


def _mask_shares(mask: torch.Tensor) -> tuple[float, float]:
    """Return the shares of pairs and of keys that a mask allows; without contents, none are known."""
    if not has_contents(mask) or mask.dim() < 2 or not mask.numel():
        return 0.0, 0.0
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return float(allowed.float().mean()), float(allowed.any(dim=-2).float().mean())


def _causal_share(queries: int, keys: int) -> float:
    """Return the share of pairs needed where a query sees the keys up to its own position."""
    needed_pairs = sum(min(row + 1, keys) for row in range(queries))
    return needed_pairs / (queries * keys) if queries and keys else 0.0
