"""Hostile variants that PyTorch itself does not survive, found with allocator checks; never run."""

from __future__ import annotations

from opforge.cases.variants import ILL_CONDITIONED
from opforge.ops import Operator
from opforge.ops.undefined import is_solver

_CRASHES = {
    "_chunk_cat": frozenset({"zero_dim"}),
    "_ctc_loss_backward": frozenset({"empty", "lazy_clone"}),
    "_embedding_bag_backward": frozenset({"empty"}),
    "_embedding_bag_per_sample_weights_backward": frozenset({"empty"}),
    "_pdist_backward": frozenset({"empty"}),
    "_scaled_dot_product_flash_attention_for_cpu": frozenset({"transposed"}),
    "_segment_reduce_backward": frozenset({"empty"}),
    "adaptive_max_pool3d_backward": frozenset({"strided", "one_transposed"}),
    "addbmm_.default": frozenset({"lazy_clone"}),
    "batch_norm_backward": frozenset({"empty"}),
    "grid_sampler_2d_backward": frozenset({"nan", "inf"}),
    "huber_loss.out": frozenset({"lazy_clone"}),
    "linalg_lstsq": frozenset({"argument:rcond"}),
    "linalg_lu.out": frozenset({"transposed"}),
    "lu_unpack.out": frozenset({"transposed"}),
    "median": frozenset({"expanded", "expanded_last"}),
    "mse_loss.out": frozenset({"lazy_clone"}),
    "multi_margin_loss_backward": frozenset({"argument:reduction"}),
    "nanmedian": frozenset({"expanded", "expanded_last"}),
    "native_batch_norm_backward": frozenset({"empty"}),
    "native_group_norm_backward": frozenset({"expanded", "expanded_last"}),
    "segment_reduce": frozenset({"empty"}),
    "smooth_l1_loss.out": frozenset({"lazy_clone"}),
    "soft_margin_loss.out": frozenset({"lazy_clone"}),
    "tril.out": frozenset({"transposed"}),
    "triu.out": frozenset({"transposed"}),
    "unfold_backward": frozenset({"zero_dim"}),
}
"""By packet or operator: ATen writes out of bounds, reads uninitialised memory, or aborts.

One copies lazy clones in a parallel loop, which its own assertion forbids; others resize them."""


_EQUIVALENT_LAYOUTS = {"strided": "pitched", "transposed": "permuted"}
"""By layout: another layout on which ATen behaves the same."""
_SCALE_ARGUMENTS = frozenset(
    f"argument:{name}" for name in ("scales", "scales_d", "scales_h", "scales_w", "scale_factors")
)


def crashing_variants(op: Operator) -> frozenset[str]:
    """Return the variants that crash ATen on an operator, or to which it has no defined answer."""
    crashing = _CRASHES.get(op.name, _CRASHES.get(op.packet, frozenset()))
    crashing |= {equivalent for name, equivalent in _EQUIVALENT_LAYOUTS.items() if name in crashing}
    if "upsample" in op.packet:
        crashing |= _SCALE_ARGUMENTS  # a scale that contradicts the result's size makes ATen read out of bounds
    return ILL_CONDITIONED | crashing if is_solver(op.packet) else crashing
