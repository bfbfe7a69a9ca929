"""Operators with several right answers: undefined contents, and results judged by a property."""

from __future__ import annotations

from opforge.judge.compare.properties import pooling, qr_lu, spectral, ties, unique
from opforge.judge.compare.properties.property_check import Accepted, PropertyCheck, Results
from opforge.judge.compare.properties.signed_zeros import zero_signs_matter
from opforge.ops.undefined import UNDEFINED_CONTENTS

__all__ = [
    "LAYOUT_IS_INPUT",
    "PARTLY_UNDEFINED",
    "PROPERTY_CHECKS",
    "UNDECLARED_WRITES",
    "UNDEFINED_CONTENTS",
    "Accepted",
    "PropertyCheck",
    "Results",
    "zero_signs_matter",
]

PARTLY_UNDEFINED = frozenset({"_ctc_loss"})
"""Bases that leave part of a result uninitialised and never give NaN elsewhere in it.

The part is ``log_alpha`` beyond each target's length.
"""

LAYOUT_IS_INPUT = frozenset(
    {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "set_"}
)
"""Bases whose answer is about memory and not about elements: it changes with the layout."""

CHECKS_INDICES = frozenset({
    "embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "put", "scatter", "scatter_add",
    "scatter_reduce", "take",
})  # fmt: skip
"""Operators that raise on a CPU for indices out of range, or count negative ones from the end."""
UNDECLARED_WRITES = frozenset({
    "native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index", "instance_norm",
})  # fmt: skip
"""Bases that update running statistics among their inputs though their schema does not say so."""

PROPERTY_CHECKS: dict[str, PropertyCheck] = {
    **dict.fromkeys(
        ("sort", "argsort", "kthvalue", "mode", "median", "nanmedian", "max", "min", "argmax", "argmin"), ties.positions
    ),
    "topk": ties.topk,
    **dict.fromkeys(("cummax", "cummin"), ties.running_extremum),
    **dict.fromkeys(
        ("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"), pooling.max_pool
    ),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), pooling.adaptive_max_pool),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), pooling.fractional_max_pool),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim"), unique.unique),
    **dict.fromkeys(("_linalg_eigh", "linalg_eigh"), spectral.eigh),
    "linalg_eig": spectral.eig,
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), spectral.eigvals),
    **dict.fromkeys(("_linalg_svd", "linalg_svd", "svd"), spectral.svd),
    **dict.fromkeys(("linalg_qr", "qr"), qr_lu.qr),
    "geqrf": qr_lu.geqrf,
    "linalg_lu": qr_lu.lu,
    **dict.fromkeys(("linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info"), qr_lu.lu_packed),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"), qr_lu.lu_packed),
}
"""Property checks for results that may differ from ATen's, by packet."""
