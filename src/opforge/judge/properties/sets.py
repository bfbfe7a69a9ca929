"""Unique elements in any order."""

from __future__ import annotations

import torch

from opforge.judge.properties.sight import Ruling, Sight, equal, wrong


def unique(sight: Sight) -> Ruling | None:
    """Check unique elements: without ``sorted`` the order is free; inverse and counts follow it."""
    results = range(len(sight.aten))
    if sight.given.get("sorted", True) or sight.same(*results) or sight.kernel[0].shape != sight.aten[0].shape:
        return None
    dim = sight.given.get("dim")
    kernel, aten, source = (_rows(t, dim) for t in (sight.kernel[0], sight.aten[0], sight.tensor("self")))
    if sorted(_keys(kernel)) != sorted(_keys(aten)):
        raise wrong(f"{sight.names[0]}: the elements, in whatever order, are not those that ATen has")
    if (inverse := sight.kernel[1]).numel():
        _check_inverse(sight.names[1], kernel, source, inverse.reshape(-1))
    if len(sight.kernel) > 2 and (counts := sight.kernel[2]).numel():
        pairs = [sorted(zip(_keys(e), c.tolist(), strict=True)) for e, c in ((kernel, counts), (aten, sight.aten[2]))]
        if pairs[0] != pairs[1]:
            raise wrong(f"{sight.names[2]}: counts do not belong to the elements that they stand beside")
    return Ruling(frozenset(results), "elements stand in another order than ATen's, which sorted=False leaves free")


def _check_inverse(name: str, kernel: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> None:
    if bool(((inverse < 0) | (inverse >= len(kernel))).any()):
        raise wrong(f"{name}: a position is outside of {len(kernel)} elements")
    if not bool(equal(kernel[inverse], source).all()):
        raise wrong(f"{name}: positions do not lead back to the input's elements")


def _rows(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return one row for each element, or for each slice along ``dim``."""
    if dim is None:
        return tensor.reshape(-1, 1)
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _keys(rows: torch.Tensor) -> list[bytes]:
    """Return a sortable key for each row; zeros have no sign."""
    dense = (rows + 0 if rows.dtype != torch.bool else rows.to(torch.uint8)).contiguous()
    return [row.tobytes() for row in dense.view(torch.uint8).numpy()]
