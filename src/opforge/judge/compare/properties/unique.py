"""Unique elements in any order."""

from __future__ import annotations

import torch

from opforge.judge.compare.properties.property_check import Accepted, Results, equal_or_both_nan, wrong_result


def unique(call: Results) -> Accepted | None:
    """Check unique elements: without ``sorted`` the order is free; inverse and counts follow it."""
    results = range(len(call.aten))
    if call.arguments.get("sorted", True) or call.same_bits(*results) or call.kernel[0].shape != call.aten[0].shape:
        return None
    dim = call.arguments.get("dim")
    kernel, aten, source = (_rows(t, dim) for t in (call.kernel[0], call.aten[0], call.tensor_argument("self")))
    if sorted(_keys(kernel)) != sorted(_keys(aten)):
        raise wrong_result(f"{call.result_names[0]}: the elements differ from ATen's in any order")
    if (inverse := call.kernel[1]).numel():
        _check_inverse(call.result_names[1], kernel, source, inverse.reshape(-1))
    if len(call.kernel) > 2 and (counts := call.kernel[2]).numel():
        pairs = [sorted(zip(_keys(e), c.tolist(), strict=True)) for e, c in ((kernel, counts), (aten, call.aten[2]))]
        if pairs[0] != pairs[1]:
            raise wrong_result(f"{call.result_names[2]}: counts do not match their elements")
    return Accepted(frozenset(results), "elements are in another order than ATen's, which sorted=False allows")


def _check_inverse(name: str, kernel: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> None:
    if bool(((inverse < 0) | (inverse >= len(kernel))).any()):
        raise wrong_result(f"{name}: a position is outside {len(kernel)} elements")
    if not bool(equal_or_both_nan(kernel[inverse], source).all()):
        raise wrong_result(f"{name}: positions do not reconstruct the input")


def _rows(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return one row for each element, or for each slice along ``dim``."""
    if dim is None:
        return tensor.reshape(-1, 1)
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _keys(rows: torch.Tensor) -> list[bytes]:
    """Return a sortable key for each row; zeros have no sign."""
    dense = (rows + 0 if rows.dtype != torch.bool else rows.to(torch.uint8)).contiguous()
    return [row.tobytes() for row in dense.view(torch.uint8).numpy()]
