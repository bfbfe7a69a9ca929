"""ATen operators that a kernel may not call: the one it replaces, and its equivalents."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable

import torch

from opforge.judge.compare.properties import UNDEFINED_CONTENTS
from opforge.judge.reference.aten import ReferenceCall
from opforge.ops import Operator, table
from opforge.ops.stems import stem
from opforge.sandbox.guard.traps import CallCounter
from opforge.sandbox.guest.loader import aten_function

EQUIVALENCE_GROUPS: dict[str, frozenset[str]] = {
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
        "slow_conv_dilated2d", "slow_conv_dilated3d", "conv_depthwise3d", "_conv_depthwise2d", "conv_tbc",
        "_nnpack_spatial_convolution", "cudnn_convolution_add_relu", "miopen_depthwise_convolution",
    }),
    "attention": frozenset({
        "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
        "_cudnn_attention_forward", "_scaled_dot_product_fused_attention_overrideable", "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd", "_triton_scaled_dot_attention", "_triton_multi_head_attention",
    }),
    "softmax": frozenset({"softmax", "log_softmax"}),
    "normalisation": frozenset({"layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "batch_norm_elemt"}),
    "maximum pooling": frozenset({"max_pool2d", "adaptive_max_pool2d", "fractional_max_pool2d"}),
    "average pooling": frozenset({"avg_pool2d", "adaptive_avg_pool2d"}),
    "sorting": frozenset({"sort", "argsort", "msort", "topk"}),
    "greatest element": frozenset({"max", "amax", "argmax", "aminmax"}),
    "least element": frozenset({"min", "amin", "argmin", "aminmax"}),
    "variance": frozenset({"var", "std", "var_mean", "std_mean"}),
    "norm": frozenset({"norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm", "dist"}),
    "distance": frozenset({"cdist", "pdist", "_euclidean_dist"}),
    "inverse": frozenset({"inverse", "linalg_inv", "linalg_inv_ex", "linalg_solve", "linalg_solve_ex", "_linalg_solve_ex"}),
    "triangular solution": frozenset({"triangular_solve", "linalg_solve_triangular"}),
    "Cholesky decomposition": frozenset({"cholesky", "linalg_cholesky_ex"}),
    "singular values": frozenset({"svd", "linalg_svdvals"}),
    "Fourier transform": frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"}),
}  # fmt: skip
"""Packets that are one operation under several names.

A kernel for one of them may call none of them, nor packets with the same stem."""

_GENERAL: dict[str, tuple[str, ...]] = {
    "matrix product": (
        *EQUIVALENCE_GROUPS["convolution"], *EQUIVALENCE_GROUPS["attention"], *EQUIVALENCE_GROUPS["distance"],
        *EQUIVALENCE_GROUPS["inverse"], *EQUIVALENCE_GROUPS["triangular solution"],
        "convolution_backward", "_compute_linear_combination", "embedding_bag", "mkldnn_rnn_layer", "lstm", "gru", "rnn_tanh",
        "rnn_relu", "linalg_lu_solve", "ormqr", "linalg_householder_product", "cholesky_solve", "sspaddmm", "hspmm",
        "_dyn_quant_matmul_4bit", "matrix_exp", "fbgemm_linear_int8_weight", "_mixed_dtypes_linear",
        "linalg_ldl_solve", "linalg_lstsq",
    ),
    "convolution": ("convolution_backward",),
    "softmax": tuple(EQUIVALENCE_GROUPS["attention"]),
    "inverse": ("linalg_ldl_solve", "linalg_lstsq"),
}  # fmt: skip
"""Packets of which an operation is a special case.

They may be built from the operation. A kernel for it may not call them."""

_MATRIX_PRODUCT_NAME = re.compile(r"(?:^|_)(?:mm|bmm|addmm|matmul)(?:_|$)")

_HELPERS = frozenset({
    "_to_copy", "clone", "copy_", "copy", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "fill_", "zero_", "zeros", "full", "ones", "zeros_like", "ones_like", "full_like", "scalar_tensor", "lift_fresh",
    "_local_scalar_dense", "resize_", "constant_pad_nd", "arange",
})  # fmt: skip


def forbidden_operators(served: Iterable[Operator]) -> list[str]:
    """Return the names of all operators that a kernel serving these may not call.

    Composite equivalents are left out: they call other operators, which are caught.
    """
    names: dict[str, None] = {}
    for op in served:
        if op.base not in UNDEFINED_CONTENTS:
            names.update(dict.fromkeys(table().packet(op.packet)))
            equivalents = (name for packet in equivalent_packets(op.packet) for name in table().packet(packet))
            names.update(dict.fromkeys(name for name in equivalents if not _is_composite(name)))
    return list(names)


@functools.cache
def equivalent_packets(packet: str) -> tuple[str, ...]:
    """Return the packets that are the same operation under another name, or generalise it."""
    stems = packets_by_stem()
    related = {packet, *stems.get(stem(packet), ())}
    groups = [
        operation for operation, group in EQUIVALENCE_GROUPS.items() if any(_group_contains(group, p) for p in related)
    ]
    for operation in groups:
        related |= {*EQUIVALENCE_GROUPS[operation], *_GENERAL.get(operation, ())}
        if operation == "matrix product":
            related |= {p for packets in stems.values() for p in packets if _MATRIX_PRODUCT_NAME.search(p)}
    return tuple(sorted({p for name in related for p in (name, *stems.get(stem(name), ()))} - {packet}))


@functools.cache
def packets_by_stem() -> dict[str, tuple[str, ...]]:
    """Return the packets of the table, grouped by stem."""
    by_stem: dict[str, dict[str, None]] = {}
    for op in table():
        by_stem.setdefault(stem(op.packet), {})[op.packet] = None
    return {name: tuple(packets) for name, packets in by_stem.items()}


def _group_contains(group: frozenset[str], packet: str) -> bool:
    return packet in group or stem(packet) in {stem(member) for member in group}


def _is_composite(name: str) -> bool:
    op = table().get(name)
    return op is None or op.composite


def wrapped_operators(op: Operator, call: ReferenceCall) -> list[str]:
    """Return the operators of the only packet, besides helpers, that a composite one calls."""
    if not op.composite:
        return []
    args, kwargs, _inputs = call.build_arguments()
    # If it raises, its calls before the error suffice.
    with contextlib.suppress(Exception), torch.no_grad(), CallCounter() as listing:
        aten_function(op.name)(*args, **kwargs)
    parts = {name.partition(".")[0] for name in listing.calls}
    packets = [packet for packet in sorted(parts - _HELPERS) if not _is_view(packet)]
    return list(table().packet(packets[0])) if len(packets) == 1 else []


def describe(op: Operator, called: list[str]) -> str:
    """Say which forbidden call a kernel made."""
    first = called[0]
    packet = first.partition(".")[0]
    if packet in (op.packet, op.base) or packet.rstrip("_") == op.packet:
        return f"calls aten::{first}, the operator that it replaces"
    for operation, group in EQUIVALENCE_GROUPS.items():
        if _group_contains(group, packet.rstrip("_")) and _group_contains(group, op.packet):
            return f"calls aten::{first}, ATen's own {operation}, to replace {op.name}"
    if packet.rstrip("_") in equivalent_packets(op.packet):
        return f"calls aten::{first}, which computes the same in ATen, to replace {op.name}"
    if "::" in first:
        return f"calls {first}, torch's own implementation outside aten"
    return f"calls aten::{first}, which is what {op.name} is in ATen"


def _is_view(packet: str) -> bool:
    """Whether an operator only returns a view of its input."""
    operators = [table().get(name) for name in table().packet(packet)]
    return any(
        op is not None and any(r.alias and not r.writes for r in op.returns) and not op.mutates for op in operators
    )
