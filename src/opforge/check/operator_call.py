"""One call of an operator: its arguments, its results, and variants in layout, size and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from opforge.cases.variants import LAYOUT_VARIANTS, CallTensors
from opforge.runtime.trees import instances, leaves, map_instances

_DTYPE_ABBREVIATIONS = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True)
class OperatorCall:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(instances((self.args, dict(self.kwargs)), torch.Tensor))

    def map_tensors(self, function: Callable[[torch.Tensor], Any]) -> OperatorCall:
        """Map the call's tensors; a tensor that occurs twice is mapped twice."""
        args, kwargs = map_instances((self.args, dict(self.kwargs)), torch.Tensor, function)
        return OperatorCall(args, kwargs)

    def with_tensors(self, tensors: Iterable[Any]) -> OperatorCall:
        remaining = iter(tensors)
        return self.map_tensors(lambda _old: next(remaining))

    def copy(self) -> OperatorCall:
        """Return the same call with new memory in the same layout."""
        return self.map_tensors(copy_with_layout)

    def __str__(self) -> str:
        parts = [_describe(value) for value in self.args] + [
            f"{key}={_describe(value)}" for key, value in self.kwargs.items()
        ]
        return f"({', '.join(parts)})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


def describe_tensor(t: torch.Tensor) -> str:
    """Describe a tensor's dtype, shape, and unusual layout."""
    text = f"{_DTYPE_ABBREVIATIONS.get(t.dtype, str(t.dtype).removeprefix('torch.'))}{list(t.shape)}"
    if t.layout == torch.strided:
        text += "" if t.is_contiguous() else f" strides {list(t.stride())}"
        text += f" offset {t.storage_offset()}" if t.storage_offset() else ""
    return text


def copy_with_layout(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, offset and surrounding storage."""
    if t.layout != torch.strided:
        return t.detach().clone()
    count = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    storage = t.detach().as_strided((count,), (1,), 0).clone()
    return storage.as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_(t.requires_grad)


def to_device(t: torch.Tensor, device: str) -> torch.Tensor:
    """Move a tensor to another device with the same layout and surrounding storage."""
    if device == "cpu" or t.layout != torch.strided:
        return t.to(device)
    count = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    storage = t.detach().as_strided((count,), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def flat_results(value: Any) -> list[Any]:
    """Return all leaves of an operator's results."""
    return [] if value is None else list(leaves(value))


def layout_variants(call: OperatorCall, written_indices: frozenset[int] = frozenset()) -> dict[str, OperatorCall]:
    """Return the call in other layouts of all tensors, and with only the first one transposed."""
    tensors = call.tensors
    if not tensors or any(t.layout != torch.strided for t in tensors):
        return {}
    device = tensors[0].device.type
    plain = tuple(t.detach().cpu() for t in tensors)
    variants: dict[str, OperatorCall] = {}
    for name, variant in LAYOUT_VARIANTS.items():
        varied = variant(CallTensors(plain, written=written_indices))
        if varied is None:
            continue
        placed = [to_device(t, device) for t in varied]
        variants[name] = call.with_tensors(placed)
        if name == "transposed" and len(placed) > 1 and placed[0].dim() > 1:
            variants["transposed first"] = call.with_tensors([placed[0], *tensors[1:]])
    return variants


def resized(call: OperatorCall, new_size: Callable[[int], int], seed: int = 0) -> OperatorCall:
    """Return the call with other sizes; equal sizes stay equal, contents stay similar."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[int, int] = {}

    def other(size: int) -> int:
        return sizes.setdefault(size, new_size(size))

    return call.map_tensors(lambda t: similar_tensor(t, [other(s) for s in t.shape], generator))


def similar_tensor(t: torch.Tensor, shape: Iterable[int], generator: torch.Generator) -> torch.Tensor:
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


def as_dtype(call: OperatorCall, dtype: torch.dtype) -> OperatorCall:
    """Return the call with its floating-point tensors in another dtype."""
    return call.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t)
