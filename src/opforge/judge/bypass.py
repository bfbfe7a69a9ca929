"""Which of ATen's operators a kernel may not call: the one that it replaces, and those that are the same by another name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from opforge.judge.properties import UNDEFINED_CONTENTS
from opforge.judge.reference import Call
from opforge.ops import Operator, table
from opforge.sandbox.loader import aten_function
from opforge.sandbox.traps import Listing

GROUPS: dict[str, frozenset[str]] = {
    "matrix product": frozenset({
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "matmul", "linear", "inner", "einsum",
        "tensordot", "chain_matmul", "linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "_addmm_activation", "_int_mm",
        "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "bilinear", "_trilinear", "mkldnn_linear", "_sparse_mm",
    }),
    "convolution": frozenset({
        "convolution", "_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "_convolution_mode", "cudnn_convolution", "cudnn_convolution_transpose",
        "cudnn_convolution_relu", "mkldnn_convolution", "miopen_convolution", "mps_convolution", "thnn_conv2d",
        "_slow_conv2d_forward", "slow_conv3d", "slow_conv3d_forward", "slow_conv_transpose2d", "slow_conv_transpose3d",
        "slow_conv_dilated2d", "slow_conv_dilated3d", "conv_depthwise3d", "_conv_depthwise2d",
    }),
    "attention": frozenset({
        "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
        "_cudnn_attention_forward", "_scaled_dot_product_fused_attention_overrideable",
    }),
}  # fmt: skip
"""Packets that are one operation in several guises: a kernel for one may call none of them."""

_HELPERS = frozenset({
    "_to_copy", "clone", "copy_", "copy", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "fill_", "zero_", "zeros", "full", "ones", "zeros_like", "ones_like", "full_like", "scalar_tensor", "lift_fresh",
    "_local_scalar_dense", "resize_", "constant_pad_nd", "arange",
})  # fmt: skip


def forbidden(served: Iterable[Operator]) -> list[str]:
    """Return the names of all operators that a kernel serving these may not call."""
    found: dict[str, None] = {}
    for op in served:
        if op.base not in UNDEFINED_CONTENTS:
            for packet in (op.packet, *(p for group in GROUPS.values() if op.packet in group for p in sorted(group))):
                found.update(dict.fromkeys(table().packet(packet)))
    return list(found)


def only_part(op: Operator, call: Call) -> list[str]:
    """Return the operators that a composite one is in truth: those of its one part, when all else that it calls are helpers."""
    if not op.composite:
        return []
    args, kwargs, _inputs = call.build()
    with contextlib.suppress(Exception), torch.no_grad(), Listing() as listing:  # what it did before it raised will do
        aten_function(op.name)(*args, **kwargs)
    parts = {name.partition(".")[0] for name in listing.calls}
    named = [packet for packet in sorted(parts - _HELPERS) if not _is_view(packet)]
    return list(table().packet(named[0])) if len(named) == 1 else []


def reason(op: Operator, called: list[str]) -> str:
    """Say which call gave a kernel away."""
    first = called[0]
    packet = first.partition(".")[0]
    if packet in (op.packet, op.base) or packet.rstrip("_") == op.packet:
        return f"calls aten::{first}, the operator that it replaces"
    for what, group in GROUPS.items():
        if packet.rstrip("_") in group and op.packet in group:
            return f"calls aten::{first}, ATen's own {what}, to replace {op.name}"
    return f"calls aten::{first}, which is what {op.name} is in ATen"


def _is_view(packet: str) -> bool:
    """Whether all that an operator does is to give another look at its input."""
    found = [table().get(name) for name in table().packet(packet)]
    return any(op is not None and any(r.alias and not r.writes for r in op.returns) and not op.mutates for op in found)
