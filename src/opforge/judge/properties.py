"""Operators whose answer is not one value: undefined contents, and indices where elements tie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opforge.ops.undefined import UNDEFINED_CONTENTS

__all__ = ["PARTLY_UNDEFINED", "UNDEFINED_CONTENTS", "gives_positions", "tie_checker"]

PARTLY_UNDEFINED = frozenset({"_ctc_loss"})
"""Bases that leave part of a result uninitialised and never give NaN elsewhere in it (``log_alpha`` beyond each target's length)."""

LAYOUT_IS_INPUT = frozenset(
    {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias", "set_"}
)
"""Bases whose answer is about memory and not about elements, so that it is another one in another layout."""

WRITES_UNSAID = frozenset({
    "native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index", "instance_norm",
})  # fmt: skip
"""Bases that update running statistics among their inputs though their schema does not say so."""

_DIM_AT = {
    "sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "mode": 1, "median": 1, "nanmedian": 1,
    "max": 1, "min": 1, "argmax": 1, "argmin": 1,
}  # fmt: skip
"""Operators that give positions, and where their ``dim`` stands among the arguments."""
_WHOLE_LINE = frozenset({"sort", "argsort", "topk"})
"""Those whose positions along ``dim`` must all differ."""


def gives_positions(packet: str, result: int, count: int) -> bool:
    """Whether a result of an operator holds positions: the only one of argmax and its like, the second of a pair."""
    if packet in ("argmax", "argmin", "argsort"):
        return count == 1
    return packet in _DIM_AT and count == 2 and result == 1


def tie_checker(
    base: str, overload: str, args: Any, kwargs: dict[str, Any]
) -> Callable[[torch.Tensor, torch.Tensor], bool] | None:
    """Return a check that two index results point at equal elements, for operators where ties may be broken freely."""
    if base not in _DIM_AT or kwargs.get("stable") or "stable" in overload or not args:
        return None
    source = args[0]
    position = _DIM_AT[base]
    dim = kwargs.get("dim", args[position] if len(args) > position else (None if base.startswith("arg") else -1))
    if not isinstance(source, torch.Tensor) or (dim is not None and not isinstance(dim, int)):
        return None

    def check(kernel: torch.Tensor, aten: torch.Tensor) -> bool:
        return _same_elements(source, dim, kernel.long(), aten.long(), distinct=base in _WHOLE_LINE)

    return check


def _same_elements(
    source: torch.Tensor, dim: int | None, kernel: torch.Tensor, aten: torch.Tensor, *, distinct: bool
) -> bool:
    if dim is None:
        source, dim = source.reshape(-1), 0
        kernel, aten = kernel.reshape(-1), aten.reshape(-1)
    if source.dim() == 0 or kernel.shape != aten.shape:
        return bool(torch.equal(kernel, aten))
    if kernel.dim() < source.dim():
        kernel, aten = kernel.unsqueeze(dim), aten.unsqueeze(dim)
    size = source.shape[dim]
    outside = any(bool((t < 0).any() or (t >= size).any()) for t in (kernel, aten))
    if kernel.numel() == 0 or kernel.dim() != source.dim() or outside:
        return bool(torch.equal(kernel, aten))
    if distinct and kernel.shape[dim] > 1 and (kernel.sort(dim).values.diff(dim=dim) == 0).any():
        return False
    left, right = source.gather(dim, kernel), source.gather(dim, aten)
    return bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124  # NaN equals NaN here
