"""Values of a case's arguments. All are plain data: nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from opforge.errors import UnknownNameError

# Short names from PyTorch's operator-input logs: the attribute of ``torch``, and the element size.
DTYPES: dict[str, tuple[str, int]] = {
    "f64": ("float64", 8),
    "f32": ("float32", 4),
    "f16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "f8e4m3fn": ("float8_e4m3fn", 1),
    "f8e5m2": ("float8_e5m2", 1),
    "f8e4m3fnuz": ("float8_e4m3fnuz", 1),
    "f8e5m2fnuz": ("float8_e5m2fnuz", 1),
    "f8e8m0fnu": ("float8_e8m0fnu", 1),
    "c32": ("complex32", 4),
    "c64": ("complex64", 8),
    "c128": ("complex128", 16),
    "i8": ("int8", 1),
    "i16": ("int16", 2),
    "i32": ("int32", 4),
    "i64": ("int64", 8),
    "u8": ("uint8", 1),
    "u16": ("uint16", 2),
    "u32": ("uint32", 4),
    "u64": ("uint64", 8),
    "b8": ("bool", 1),
}
SHORT_NAMES = {torch_name: short for short, (torch_name, _) in DTYPES.items()}
_DTYPE_ALIASES = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "long": "i64",
    "int": "i32",
    "short": "i16",
    "cfloat": "c64",
}
LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


def parse_dtype(name: str) -> str:
    """Return the short name of a dtype: ``bf16``, ``bfloat16``, ``torch.bfloat16`` or ``bool``."""
    plain = name.strip().removeprefix("torch.")
    short = _DTYPE_ALIASES.get(plain) or SHORT_NAMES.get(plain) or plain
    if short not in DTYPES:
        raise UnknownNameError("dtype", name, [*DTYPES, *SHORT_NAMES, *_DTYPE_ALIASES])
    return short


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype given as an argument; ``short`` is a key of ``DTYPES``."""

    short: str


@dataclass(frozen=True, slots=True)
class Layout:
    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device given as an argument, such as ``cpu`` or ``cuda:0``."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as data: its geometry, and the source of its contents (stored bytes, or a seed)."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None
    """None means contiguous."""
    offset: int = 0
    """Storage offset in elements."""
    device: str | None = None
    """None means the device of the run."""
    at: int | None = None
    """Byte offset of the stored contents in the suite's blob; None means seeded contents."""
    nbytes: int | None = None
    """Bytes of storage; None means what the geometry needs."""
    low: float | None = None
    high: float | None = None
    """Range of seeded contents, with ``low``, without ``high``; None means the dtype's default."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape) if self.stride is None else self.stride

    @property
    def storage_nbytes(self) -> int:
        """Return the bytes of storage that the tensor needs."""
        if self.nbytes is not None:
            return self.nbytes
        if self.numel == 0:
            return self.offset * self.itemsize
        if self.stride is None:
            return (self.offset + self.numel) * self.itemsize
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.itemsize


Scalar: TypeAlias = "bool | int | float | complex | str | Dtype | Layout | MemoryFormat | Device | TensorSpec | None"
Value: TypeAlias = "Scalar | list[Value] | tuple[Value, ...]"
Arguments: TypeAlias = "tuple[tuple[Value, ...], dict[str, Value]]"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, as torch has them (sizes of zero count as one)."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
