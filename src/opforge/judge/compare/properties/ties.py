"""Positions of elements: where elements tie, any of their positions is right."""

from __future__ import annotations

import torch

from opforge.judge.compare.properties.property_check import Accepted, Results, equal_or_both_nan, wrong_result

_TIES_NOTE = "ties are broken differently from ATen"


def positions(
    call: Results, *, result_index: int = 1, distinct: bool = False, default_dim: int | None = -1
) -> Accepted | None:
    """Check that positions point at elements equal to those at ATen's positions.

    With ``distinct``, all positions along ``dim`` must differ.
    """
    if len(call.aten) != result_index + 1 or call.same_bits(result_index) or call.arguments.get("stable"):
        return None
    dim = call.arguments.get("dim", default_dim)
    source = call.tensor_argument("self")
    kernel, aten = call.kernel[result_index], call.aten[result_index]
    if isinstance(dim, str):
        return None
    if dim is None:
        source, dim, kernel, aten = source.reshape(-1), 0, kernel.reshape(-1), aten.reshape(-1)
    if source.dim() == 0 or not kernel.numel():
        return None
    if kernel.dim() < source.dim():
        kernel, aten = kernel.unsqueeze(dim), aten.unsqueeze(dim)
    name = call.result_names[result_index]
    _check_in_range(name, kernel, source.shape[dim])
    if distinct:
        _check_distinct(name, kernel, dim)
    _check_same_elements(name, source, dim, kernel, aten)
    return Accepted(frozenset({result_index}), f"{name}: {_TIES_NOTE}")


def topk(call: Results) -> Accepted | None:
    """Check as for sort; without ``sorted`` the order is free, and each value fits its position."""
    if call.same_bits(0, 1):
        return None
    source, dim = call.tensor_argument("self"), call.arguments.get("dim", -1)
    kernel, aten = call.kernel, call.aten
    if source.dim() == 0 or not kernel[1].numel():
        return None
    _check_in_range(call.result_names[1], kernel[1], source.shape[dim])
    _check_distinct(call.result_names[1], kernel[1], dim)
    if call.arguments.get("sorted", True):
        _check_same_elements(call.result_names[1], source, dim, kernel[1], aten[1])
        return Accepted(frozenset({1}), "" if call.same_bits(1) else f"{call.result_names[1]}: {_TIES_NOTE}")
    off = ~equal_or_both_nan(source.gather(dim, kernel[1]), kernel[0])
    if bool(off.any()):
        raise wrong_result(
            f"{call.result_names[1]}: {int(off.sum())} of {off.numel()} positions point at other values "
            f"than {call.result_names[0]} has"
        )
    if not bool(equal_or_both_nan(kernel[0].sort(dim).values, aten[0].sort(dim).values).all()):
        raise wrong_result(f"{call.result_names[0]}: the values differ from ATen's in any order")
    return Accepted(
        frozenset({0, 1}), "values and positions are in another order than ATen's, which sorted=False allows"
    )


def running_extremum(call: Results) -> Accepted | None:
    """Check positions of a running maximum or minimum: not after their own, the right value."""
    if len(call.aten) != 2 or call.same_bits(1) or not call.kernel[1].numel():
        return None
    source, dim, kernel = call.tensor_argument("self"), call.arguments["dim"], call.kernel[1]
    if isinstance(dim, str) or source.dim() == 0:
        return None
    size = source.shape[dim]
    _check_in_range(call.result_names[1], kernel, size)
    own_position = torch.arange(size).reshape([-1 if d == dim % source.dim() else 1 for d in range(source.dim())])
    if bool((late := kernel > own_position).any()):
        index = late.nonzero()[0].tolist()
        raise wrong_result(
            f"{call.result_names[1]}: position {int(kernel[tuple(index)])} at {index} comes after the element itself"
        )
    _check_same_elements(call.result_names[1], source, dim, kernel, call.aten[1])
    return Accepted(frozenset({1}), f"{call.result_names[1]}: {_TIES_NOTE}")


def _check_in_range(name: str, kernel: torch.Tensor, size: int) -> None:
    outside = (kernel < 0) | (kernel >= size)
    if bool(outside.any()):
        raise wrong_result(f"{name}: position {int(kernel[outside][0])} is outside a dimension of {size} elements")


def _check_distinct(name: str, kernel: torch.Tensor, dim: int) -> None:
    ordered = kernel.sort(dim).values
    repeated = ordered.diff(dim=dim) == 0
    if bool(repeated.any()):
        position = int(ordered.narrow(dim, 1, ordered.shape[dim] - 1)[repeated][0])
        raise wrong_result(f"{name}: position {position} occurs twice along dimension {dim}")


def _check_same_elements(name: str, source: torch.Tensor, dim: int, kernel: torch.Tensor, aten: torch.Tensor) -> None:
    left, right = source.gather(dim, kernel.long()), source.gather(dim, aten.long())
    off = ~equal_or_both_nan(left, right)
    if bool(off.any()):
        at = tuple(off.nonzero()[0].tolist())
        raise wrong_result(
            f"{name}: {int(off.sum())} of {off.numel()} positions point at other values than ATen's; "
            f"first at {list(at)}: {int(kernel[at])} holds {left[at].item()!r}, "
            f"ATen's {int(aten[at])} holds {right[at].item()!r}"
        )
