"""Compare results and describe the first difference."""

from __future__ import annotations

from typing import Any

import torch

from opforge.cases.tensors import to_float64

_RELATIVE_TOLERANCES = {
    torch.float64: 1e-7, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.complex64: 2e-4,
    torch.complex128: 1e-7,
}  # fmt: skip


def tensor_difference(expected: Any, actual: Any, *, exact: bool = False) -> str:
    """Describe how a result differs from the expected one; empty if they are the same."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if _comparable(expected) == _comparable(actual) else f"{actual!r} instead of {expected!r}"
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if expected.dtype != actual.dtype:
        return f"dtype {actual.dtype} instead of {expected.dtype}"
    if expected.layout != torch.strided or not expected.numel():
        return ""
    differs = ~_close_elements(
        _widened(expected), _widened(actual), 0.0 if exact else _RELATIVE_TOLERANCES.get(expected.dtype, 0.0)
    )
    if not bool(differs.any()):
        return ""
    return _describe_first(expected, actual, differs)


def _comparable(value: Any) -> Any:
    return value if not isinstance(value, torch.Tensor) else tuple(value.shape)


def _widened(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu()
    return to_float64(t) if t.is_floating_point() or t.is_complex() else t


def _close_elements(expected: torch.Tensor, actual: torch.Tensor, relative: float) -> torch.Tensor:
    if not (expected.is_floating_point() or expected.is_complex()):
        return expected == actual
    finite = expected.abs()[torch.isfinite(expected.abs())]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.isclose(expected, actual, rtol=relative, atol=relative * min(scale, 1e6) * 0.1, equal_nan=True)


def _describe_first(expected: torch.Tensor, actual: torch.Tensor, differs: torch.Tensor) -> str:
    count = int(differs.sum())
    index = [int(i) for i in differs.nonzero()[0]]
    position = f" at {index}" if index else ""
    wrong, right = actual.detach().cpu()[tuple(index)].item(), expected.detach().cpu()[tuple(index)].item()
    share = f" ({count} of {differs.numel()} elements differ)" if differs.numel() > 1 else ""
    return f"{format_number(wrong)} instead of {format_number(right)}{position}{share}"


def format_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def first_difference(expected: list[Any], actual: list[Any], *, exact: bool = False) -> str:
    """Describe the first difference among several results; empty if all are the same."""
    if len(expected) != len(actual):
        return f"{len(actual)} results instead of {len(expected)}"
    for position, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if message := tensor_difference(a, b, exact=exact):
            return message if len(expected) == 1 else f"result {position}: {message}"
    return ""
