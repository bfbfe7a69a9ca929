"""Operators with several right answers: undefined contents, and results judged by a property."""

from __future__ import annotations

from opforge.judge.properties import factors, pools, sets, spectral, ties
from opforge.judge.properties.sight import Property, Ruling, Sight
from opforge.judge.properties.zeros import zeros_have_signs
from opforge.ops.undefined import UNDEFINED_CONTENTS

__all__ = [
    "BY_PACKET",
    "LAYOUT_IS_INPUT",
    "PARTLY_UNDEFINED",
    "UNDEFINED_CONTENTS",
    "WRITES_UNSAID",
    "Property",
    "Ruling",
    "Sight",
    "zeros_have_signs",
]

PARTLY_UNDEFINED = frozenset({"_ctc_loss"})
"""Bases that leave part of a result uninitialised and never give NaN elsewhere in it.

The part is ``log_alpha`` beyond each target's length.
"""

LAYOUT_IS_INPUT = frozenset(
    {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "set_"}
)
"""Bases whose answer is about memory and not about elements: it changes with the layout."""

CHECKS_POSITIONS = frozenset({
    "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "put", "scatter", "scatter_add",
    "scatter_reduce", "take",
})  # fmt: skip
"""Operators that raise on a CPU for indices out of range, or count negative ones from the end."""
WRITES_UNSAID = frozenset({
    "native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index", "instance_norm",
})  # fmt: skip
"""Bases that update running statistics among their inputs though their schema does not say so."""

BY_PACKET: dict[str, Property] = {
    **dict.fromkeys(
        ("sort", "argsort", "kthvalue", "mode", "median", "nanmedian", "max", "min", "argmax", "argmin"), ties.positions
    ),
    "topk": ties.topk,
    **dict.fromkeys(("cummax", "cummin"), ties.running),
    **dict.fromkeys(("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"), pools.max_pool),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), pools.adaptive),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), pools.fractional),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim"), sets.unique),
    **dict.fromkeys(("_linalg_eigh", "linalg_eigh"), spectral.eigh),
    "linalg_eig": spectral.eig,
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), spectral.eigvals),
    **dict.fromkeys(("_linalg_svd", "linalg_svd", "svd"), spectral.svd),
    **dict.fromkeys(("linalg_qr", "qr"), factors.qr),
    "geqrf": factors.geqrf,
    "linalg_lu": factors.lu,
    **dict.fromkeys(("linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info"), factors.lu_packed),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"), factors.lu_packed),
}
"""Property checks for results that may differ from ATen's, by packet."""
