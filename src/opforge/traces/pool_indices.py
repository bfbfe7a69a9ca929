"""Indices for calls of max pooling's backward, whose own are unknown: one place of each window. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opforge.cases.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

POOL_BACKWARD_DIMS = {"max_pool2d_with_indices_backward": 2, "max_pool3d_with_indices_backward": 3}
"""Operators whose ``indices`` name a place in the window of each element, with their spatial dimensions."""


def indices_in_windows(packet: str, given: Mapping[str, Any]) -> bytes:
    """Return the storage of ``indices``, drawn from a seed; raise ValueError if its shape does not fit the call."""
    import numpy as np  # not above: it slows the start of the command line

    spec, image, dims = given["indices"], given["self"], POOL_BACKWARD_DIMS[packet]
    sizes, outputs = image.shape[-dims:], spec.shape[-dims:]
    kernel, stride, padding, dilation = (
        _for_each_dim(given[name], dims) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    stride = stride or kernel
    if len(spec.shape) != len(image.shape) or spec.shape[:-dims] != image.shape[:-dims] or spec.dtype != "i64":
        raise ValueError("its indices are not those of a pooling of `self`")
    generator = np.random.default_rng(0)
    index: npt.NDArray[np.int64] | int = 0
    for dim in range(dims):
        starts = np.arange(outputs[dim]) * stride[dim] - padding[dim]
        first = np.maximum(0, -(starts // dilation[dim]))
        last = np.minimum(kernel[dim] - 1, (sizes[dim] - 1 - starts) // dilation[dim])
        if (first > last).any():
            raise ValueError("some windows of its pooling hold no element of `self`")
        shape = [-1 if place == dim else 1 for place in range(dims)]
        drawn = generator.integers(first.reshape(shape), last.reshape(shape) + 1, spec.shape)
        index = index * sizes[dim] + starts.reshape(shape) + drawn * dilation[dim]
    return _in_storage(np.asarray(index, np.int64), spec)


def _for_each_dim(value: Sequence[int] | int, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    if len(values) not in (0, 1, dims) or any(type(number) is not int for number in values):
        raise ValueError(f"its pooling has {values} for {dims} dimensions")
    return values * dims if len(values) == 1 else values


def _in_storage(index: npt.NDArray[np.int64], spec: TensorSpec) -> bytes:
    import numpy as np

    storage = np.zeros(spec.storage_nbytes // spec.itemsize, np.int64)
    steps = [step * spec.itemsize for step in spec.strides]
    np.lib.stride_tricks.as_strided(storage[spec.offset :], spec.shape, steps)[...] = index
    return storage.tobytes()
