"""Positions of elements: where elements tie, any of their positions is right."""

from __future__ import annotations

import torch

from opforge.judge.properties.sight import Ruling, Sight, equal, wrong

_ONLY_POSITIONS = ("argmax", "argmin", "argsort")
"""Packets whose only result is positions; elsewhere they are the second of a pair."""
_DISTINCT_POSITIONS = ("sort", "argsort")
"""Packets whose positions along ``dim`` must all differ."""
_TIES_NOTE = "ties are broken in another way than ATen breaks them"


def positions(sight: Sight) -> Ruling | None:
    """Check that positions point at elements equal to those at ATen's positions."""
    index = 0 if sight.packet in _ONLY_POSITIONS else 1
    if len(sight.aten) != index + 1 or sight.same(index) or sight.given.get("stable"):
        return None
    dim = sight.given.get("dim", None if sight.packet in ("argmax", "argmin") else -1)
    source = sight.tensor("self")
    kernel, aten = sight.kernel[index], sight.aten[index]
    if isinstance(dim, str):
        return None
    if dim is None:
        source, dim, kernel, aten = source.reshape(-1), 0, kernel.reshape(-1), aten.reshape(-1)
    if source.dim() == 0 or not kernel.numel():
        return None
    if kernel.dim() < source.dim():
        kernel, aten = kernel.unsqueeze(dim), aten.unsqueeze(dim)
    name = sight.names[index]
    _inside(name, kernel, source.shape[dim])
    if sight.packet in _DISTINCT_POSITIONS:
        _check_distinct(name, kernel, dim)
    _check_same_elements(name, source, dim, kernel, aten)
    return Ruling(frozenset({index}), f"{name}: {_TIES_NOTE}")


def topk(sight: Sight) -> Ruling | None:
    """Check as for sort; without ``sorted`` the order is free, and each value fits its position."""
    if sight.same(0, 1):
        return None
    source, dim = sight.tensor("self"), sight.given.get("dim", -1)
    kernel, aten = sight.kernel, sight.aten
    if source.dim() == 0 or not kernel[1].numel():
        return None
    _inside(sight.names[1], kernel[1], source.shape[dim])
    _check_distinct(sight.names[1], kernel[1], dim)
    if sight.given.get("sorted", True):
        _check_same_elements(sight.names[1], source, dim, kernel[1], aten[1])
        return Ruling(frozenset({1}), "" if sight.same(1) else f"{sight.names[1]}: {_TIES_NOTE}")
    off = ~equal(source.gather(dim, kernel[1]), kernel[0])
    if bool(off.any()):
        raise wrong(
            f"{sight.names[1]}: {int(off.sum())} of {off.numel()} positions hold another value than {sight.names[0]} says"
        )
    if not bool(equal(kernel[0].sort(dim).values, aten[0].sort(dim).values).all()):
        raise wrong(f"{sight.names[0]}: the values, in whatever order, are not those that ATen has")
    return Ruling(
        frozenset({0, 1}), "values and positions stand in another order than ATen's, which sorted=False leaves free"
    )


def running(sight: Sight) -> Ruling | None:
    """Check positions of a running maximum or minimum: not after their own, the right value."""
    if len(sight.aten) != 2 or sight.same(1) or not sight.kernel[1].numel():
        return None
    source, dim, kernel = sight.tensor("self"), sight.given["dim"], sight.kernel[1]
    if isinstance(dim, str) or source.dim() == 0:
        return None
    size = source.shape[dim]
    _inside(sight.names[1], kernel, size)
    own_position = torch.arange(size).reshape([-1 if d == dim % source.dim() else 1 for d in range(source.dim())])
    if bool((late := kernel > own_position).any()):
        index = late.nonzero()[0].tolist()
        raise wrong(f"{sight.names[1]}: position {int(kernel[tuple(index)])} at {index} comes after the element itself")
    _check_same_elements(sight.names[1], source, dim, kernel, sight.aten[1])
    return Ruling(frozenset({1}), f"{sight.names[1]}: {_TIES_NOTE}")


def _inside(name: str, kernel: torch.Tensor, size: int) -> None:
    outside = (kernel < 0) | (kernel >= size)
    if bool(outside.any()):
        raise wrong(f"{name}: position {int(kernel[outside][0])} is outside of a dimension of {size} elements")


def _check_distinct(name: str, kernel: torch.Tensor, dim: int) -> None:
    ordered = kernel.sort(dim).values
    repeated = ordered.diff(dim=dim) == 0
    if bool(repeated.any()):
        position = int(ordered.narrow(dim, 1, ordered.shape[dim] - 1)[repeated][0])
        raise wrong(f"{name}: position {position} comes twice along dimension {dim}")


def _check_same_elements(name: str, source: torch.Tensor, dim: int, kernel: torch.Tensor, aten: torch.Tensor) -> None:
    left, right = source.gather(dim, kernel.long()), source.gather(dim, aten.long())
    off = ~equal(left, right)
    if bool(off.any()):
        at = tuple(off.nonzero()[0].tolist())
        raise wrong(
            f"{name}: {int(off.sum())} of {off.numel()} positions point at other values than ATen's; first at {list(at)}:"
            f" {int(kernel[at])} holds {left[at].item()!r}, ATen's {int(aten[at])} holds {right[at].item()!r}"
        )
