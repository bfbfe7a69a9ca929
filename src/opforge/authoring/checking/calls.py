"""One call of an operator: its arguments, its results, and variants in layout, size and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opforge.cases.twists import LAYOUTS, Inputs

_DTYPE_ABBREVIATIONS = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def mapped(self, change: Callable[[torch.Tensor], Any]) -> Call:
        """Map the call's tensors; a tensor that occurs twice is mapped twice."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def with_tensors(self, tensors: Iterable[Any]) -> Call:
        remaining = iter(tensors)
        return self.mapped(lambda _old: next(remaining))

    def copied(self) -> Call:
        """Return the same call with new memory in the same layout."""
        return self.mapped(copied)

    def __str__(self) -> str:
        parts = [_word(value) for value in self.args] + [f"{key}={_word(value)}" for key, value in self.kwargs.items()]
        return f"({', '.join(parts)})"


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_in_words(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_word, value))}]"
    return repr(value)


def tensor_in_words(t: torch.Tensor) -> str:
    """Describe a tensor's dtype, shape, and unusual layout."""
    text = f"{_DTYPE_ABBREVIATIONS.get(t.dtype, str(t.dtype).removeprefix('torch.'))}{list(t.shape)}"
    if t.layout == torch.strided:
        text += "" if t.is_contiguous() else f" strides {list(t.stride())}"
        text += f" offset {t.storage_offset()}" if t.storage_offset() else ""
    return text


def copied(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, offset and surrounding storage."""
    if t.layout != torch.strided:
        return t.detach().clone()
    count = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    storage = t.detach().as_strided((count,), (1,), 0).clone()
    return storage.as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)


def moved(t: torch.Tensor, device: str) -> torch.Tensor:
    """Move a tensor to another device with the same layout and surrounding storage."""
    if device == "cpu" or t.layout != torch.strided:
        return t.to(device)
    count = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    storage = t.detach().as_strided((count,), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def results(value: Any) -> list[Any]:
    """Return an operator's results as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def flat(value: Any) -> list[Any]:
    """Return all leaves of an operator's results."""
    return [leaf for result in results(value) for leaf in (result if isinstance(result, (tuple, list)) else [result])]


def in_layouts(call: Call, written: frozenset[int] = frozenset()) -> dict[str, Call]:
    """Return the call in other layouts of all tensors, and with only the first one transposed."""
    tensors = call.tensors
    if not tensors or any(t.layout != torch.strided for t in tensors):
        return {}
    device = tensors[0].device.type
    plain = tuple(t.detach().cpu() for t in tensors)
    variants: dict[str, Call] = {}
    for name, twist in LAYOUTS.items():
        twisted = twist(Inputs(plain, written=written))
        if twisted is None:
            continue
        placed = [moved(t, device) for t in twisted]
        variants[name] = call.with_tensors(placed)
        if name == "transposed" and len(placed) > 1 and placed[0].dim() > 1:
            variants["transposed first"] = call.with_tensors([placed[0], *tensors[1:]])
    return variants


def resized(call: Call, change: Callable[[int], int], seed: int = 0) -> Call:
    """Return the call with other sizes; equal sizes stay equal, contents stay similar."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[int, int] = {}

    def other(size: int) -> int:
        return sizes.setdefault(size, change(size))

    return call.mapped(lambda t: contents_like(t, [other(s) for s in t.shape], generator))


def contents_like(t: torch.Tensor, shape: Iterable[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of another shape with similar contents: dtype, sign, integer values."""
    size = list(shape)
    if t.is_floating_point() or t.is_complex():
        wide = torch.complex128 if t.is_complex() else torch.float64
        values = torch.randn(size, dtype=wide, generator=generator)
        if t.numel() and not t.is_complex() and bool((t.double() >= 0).all()):
            values = values.abs()
        return values.to(t.dtype).to(t.device)
    if not t.numel():
        return torch.zeros(size, dtype=t.dtype, device=t.device)
    elements = t.detach().cpu().reshape(-1)
    count = 1
    for s in size:
        count *= s
    return elements[torch.randint(len(elements), (count,), generator=generator)].reshape(size).to(t.device)


def as_dtype(call: Call, dtype: torch.dtype) -> Call:
    """Return the call with its floating-point tensors in another dtype."""
    return call.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t)
