"""Speed of light: least cost of a call, its time at measured peaks, and alarms for faster times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opforge.judge.calls import CostedCall
from opforge.judge.kinds import Kind
from opforge.judge.needs import (
    Formula,
    Need,
    estimate,
    gathered,
    moved,
    moved_whole,
    norm_backward,
    normalised,
    nothing,
    placed_over,
    pointwise,
    read_names,
    reduction,
    scattered,
    triangle,
)
from opforge.judge.peaks import Peaks
from opforge.judge.products import of_matrices
from opforge.judge.regions import distinct_bytes
from opforge.ops import Operator, table
from opforge.ops.undefined import UNDEFINED_CONTENTS

MARGIN = {"cpu": 0.25, "cuda": 0.15}
"""Share of the hard bound by which a time must be shorter to raise an alarm.

It allows for the accuracy of the peaks. They are ATen's best, which another kernel may beat. A
CPU's clock and caches are shared, so they may have been measured at a slow time."""

_NUMBERS = frozenset({"equal", "allclose", "item", "_local_scalar_dense", "is_nonzero"})
"""Packets that read contents although they return no tensor."""
_DYNAMIC = "dynamic_output_shape"
"""Tag of operators that must read contents to know the size of their result."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Least cost of a call."""

    bytes: int
    """Fewest bytes that must move: the needed inputs once, the results once."""
    in_place: bool
    """Whether results are written where inputs were read."""
    flops: int
    kind: Kind
    counted: str
    """``formula``, or ``estimate`` for operators without one."""
    sure_bytes: int = 0
    """Bytes that every honest kernel must read or write, whatever the contents."""
    sure_inputs: int = 0
    """Those of them that are inputs."""
    sure_flops: int = 0


def cost(op: Operator, args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    """Return the least cost of a call, from shapes and strides of its arguments and ATen's result.

    The arguments must be those of the call: results that share memory with them count as views.
    """
    call = CostedCall(op, tuple(args), kwargs, result)
    need = _need(call)
    written = distinct_bytes(call.outputs) if need.write is None else need.write
    sure_tensors = [*need.sure, *(call.outputs if need.sure_write else [])]
    sure_input_tensors = [*need.sure, *(call.written if need.sure_write and call.in_place else [])]
    return Cost(
        bytes=need.read + written,
        in_place=call.in_place and any(a.writes and a.name in read_names(call) for a in op.arguments),
        flops=need.flops,
        kind=need.kind,
        counted="formula" if need.formula else "estimate",
        sure_bytes=distinct_bytes(sure_tensors),
        sure_inputs=distinct_bytes(sure_input_tensors),
        sure_flops=need.sure_flops,
    )


def _need(call: CostedCall) -> Need:
    packet = call.op.packet
    empty = not any(t.numel() for t in call.outputs) and not (call.fresh and _DYNAMIC in call.op.tags)
    if packet not in _NUMBERS and (empty or call.op.base in UNDEFINED_CONTENTS):
        return nothing(call)
    if any(t.layout is not torch.strided for t in [*call.outputs, *call.tensors(*call.values)]):
        return estimate(call)
    formula = _FORMULAS.get(packet) or _formula_by_tag(call.op)
    return formula(call) if formula is not None else of_matrices(call) or estimate(call)


@cache
def _tags(family: str) -> frozenset[str]:
    op = table().get(family)
    members = table().family(op) if op is not None else []
    return frozenset(tag for member in members for tag in member.tags)


def _formula_by_tag(op: Operator) -> Formula | None:
    """Return the formula implied by torch's tags on any variant of the operator."""
    tags = _tags(op.family) | op.tags
    if "reduction" in tags:
        return reduction
    if "pointwise" in tags or (op.base.startswith("_foreach_") and not op.base.startswith(_FOREACH_NOT_POINTWISE)):
        return pointwise
    return moved if "view_copy" in tags else None


_FOREACH_NOT_POINTWISE = ("_foreach_mm", "_foreach_norm", "_foreach_max", "_foreach_powsum")


def _each(formula: Formula, *packets: str) -> dict[str, Formula]:
    return dict.fromkeys(packets, formula)


_FORMULAS: dict[str, Formula] = {
    **_each(
        pointwise, "where", "__and__", "__or__", "__iand_", "__ior_", "__irshift_", "absolute", "arccos", "arccosh",
        "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "divide", "multiply", "subtract", "negative", "greater",
        "greater_equal", "less", "less_equal", "not_equal", "fix", "floor_divide", "hardswish", "hardswish_backward",
        "elu_backward", "leaky_relu_backward", "mish_backward", "softplus_backward", "hardsigmoid_backward",
        "hardtanh_backward", "hardshrink_backward", "softshrink_backward", "prelu", "_prelu_kernel", "isclose",
        "isreal", "polar", "complex", "_masked_scale", "log_sigmoid_forward", "log_sigmoid", "special_expit", "glu",
        "special_erf", "special_erfc", "special_exp2", "special_expm1", "special_log1p", "special_xlogy",
    ),
    **_each(
        reduction, "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_logcumsumexp", "sort", "argsort", "topk",
        "msort", "median", "nanmedian", "mode", "kthvalue", "nonzero", "nanmean", "bincount", "_aminmax", "dist",
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "_unique2", "unique_dim",
        "allclose", "item", "_local_scalar_dense", "is_nonzero", "special_logsumexp", "_is_all_true", "_is_any_true",
        "equal", "_foreach_norm", "_foreach_max",
    ),
    **_each(
        normalised(5), "_softmax", "softmax", "special_softmax", "_log_softmax", "log_softmax", "special_log_softmax",
        "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    ),
    **_each(
        normalised(7), "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "batch_norm",
        "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "instance_norm",
        "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_no_update", "cudnn_batch_norm",
        "rms_norm", "_fused_rms_norm",
    ),
    **_each(
        norm_backward, "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
        "_fused_rms_norm_backward", "batch_norm_backward",
    ),
    **_each(
        moved_whole, "clone", "copy", "_to_copy", "to", "type_as", "contiguous", "cat", "concat", "concatenate", "stack",
        "_stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "flip", "fliplr", "flipud", "roll", "rot90",
        "transpose_copy", "permute_copy", "t_copy", "view_copy", "expand_copy", "repeat", "tile", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "reshape", "flatten", "_foreach_copy",
        "alias_copy", "unsqueeze_copy", "squeeze_copy", "detach_copy", "fill", "full", "full_like", "new_full", "ones",
        "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros", "zero", "_foreach_zero", "arange", "range",
        "linspace", "logspace", "eye", "scalar_tensor",
    ),
    **_each(moved, "constant_pad_nd", "pad", "diag", "diag_embed", "diagflat", "select_backward", "slice_backward"),
    **_each(placed_over, "slice_scatter", "select_scatter", "diagonal_scatter"),
    **_each(triangle, "tril", "triu"),
    **_each(gathered("self"), "gather", "index_select", "index", "_unsafe_index", "take", "take_along_dim", "masked_select"),
    "embedding": gathered("weight"),
    **_each(
        gathered("weight", lambda c: c.tensors("indices")[0].numel() * c.tensors("weight")[0].shape[-1]),
        "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only",
    ),
    **_each(
        gathered("self", lambda c: c.tensors("target")[0].numel()), "nll_loss", "nll_loss_forward", "nll_loss2d",
        "nll_loss2d_forward",
    ),
    **_each(scattered("src"), "scatter", "scatter_add", "scatter_reduce"),
    **_each(scattered("source"), "index_add", "index_copy", "index_reduce", "put"),
    **_each(scattered("values"), "index_put", "_index_put_impl", "_unsafe_index_put"),
    **_each(scattered("value"), "index_fill"),
}  # fmt: skip


def light_us(cost: Cost, peaks: Peaks, footprint_bytes: int, *, tf32: bool = False) -> tuple[float, str]:
    """Return the least time that a call can take, and its limit: ``memory`` or ``compute``.

    ``footprint_bytes`` is the memory touched before the same memory is used again. It sets the
    bandwidth.
    """
    memory_us = _us(cost.bytes, peaks.bandwidth(footprint_bytes, in_place=cost.in_place))
    kind = Kind.TF32_PRODUCT if tf32 and cost.kind is Kind.F32_PRODUCT else cost.kind
    rate = peaks.rate(kind)
    compute_us = _us(cost.flops, rate) if rate else 0.0
    return (compute_us, "compute") if compute_us > memory_us else (memory_us, "memory")


def sure_us(cost: Cost, peaks: Peaks, footprint_bytes: int) -> float:
    """Return a time that no honest kernel beats, from required memory and fastest arithmetic."""
    fastest = peaks.fastest
    return max(
        _us(cost.sure_inputs, peaks.bandwidth(footprint_bytes)),
        _us(cost.sure_bytes, peaks.bandwidth(min(footprint_bytes, cost.sure_bytes))),
        _us(cost.sure_flops, fastest) if fastest else 0.0,
    )


def shares(
    cost: Cost,
    peaks: Peaks,
    footprint_bytes: int,
    kernel_us: float,
    aten_us: float,
    *,
    slow_us: float | None = None,
    tf32: bool = False,
) -> dict[str, Any]:
    """Return the field ``light`` of a line of results, and ``alarm`` if the kernel is too fast.

    ``slow_us`` is the slow end of the interval of the kernel's time. If ATen's time is also below
    the bound, the peaks are too low, and there is no alarm.
    """
    us, bound = light_us(cost, peaks, footprint_bytes, tf32=tf32)
    light = {
        "bytes": cost.bytes,
        "flops": cost.flops,
        "us": us,
        "bound": bound,
        "kernel": 100 * us / kernel_us,
        "aten": 100 * us / aten_us,
        "counted": cost.counted,
    }
    slow = kernel_us if slow_us is None else max(slow_us, kernel_us)
    least = sure_us(cost, peaks, footprint_bytes)
    limit = least * (1 - MARGIN[peaks.kind])
    if slow >= limit or aten_us < limit:
        return {"light": light}
    work = f"{cost.sure_bytes:,} bytes" + (f" and {cost.sure_flops:,} operations" if cost.sure_flops else "")
    alarm = f"faster than light: {slow:.3g} µs for {work}, which take {least:.3g} µs at the measured peaks of {peaks.device}"
    return {"light": light, "alarm": alarm}


def _us(amount: float, per_second: float) -> float:
    return amount / per_second * 1e6
