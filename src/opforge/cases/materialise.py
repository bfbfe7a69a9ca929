"""Make the tensors of a case: the same bytes in any process, from stored contents or from a seed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opforge.cases.encoding import TORCH_DTYPES
from opforge.cases.values import TensorSpec

Bytes = npt.NDArray[np.uint8]
_INT_HIGH = 10


def write_storage(spec: TensorSpec, target: Bytes, blob: Bytes | None, seed: str) -> None:
    """Fill ``target`` (as many bytes as the spec's storage) with the contents of a tensor."""
    if spec.at is None:
        target[:] = seeded_bytes(spec, seed)
        return
    if blob is None:
        raise ValueError("the case has stored tensors, but its suite has no blob")
    target[:] = blob[spec.at : spec.at + len(target)]


def seeded_bytes(spec: TensorSpec, seed: str) -> Bytes:
    """Return the seeded contents of a tensor's whole storage."""
    count = spec.storage_nbytes // spec.itemsize
    if count == 0:
        return np.zeros(0, np.uint8)
    key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    dtype = TORCH_DTYPES[spec.dtype]
    if dtype == torch.bool:
        drawn: Any = generator.integers(0, 2, count, dtype=np.uint8)
    elif dtype.is_complex:
        drawn = _floats(generator, spec, 2 * count)
        part = {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(dtype, torch.float64)
        return _bytes_of(drawn, part)
    elif dtype.is_floating_point:
        drawn = _floats(generator, spec, count)
    else:
        low = 0 if spec.low is None else int(spec.low)
        high = max(low + 1, _INT_HIGH if spec.high is None else int(spec.high))
        drawn = generator.integers(low, high, count, dtype=np.int64)
    return _bytes_of(drawn, dtype)


def _bytes_of(drawn: Any, dtype: torch.dtype) -> Bytes:
    contents: Bytes = torch.from_numpy(drawn).to(dtype).view(torch.uint8).numpy()
    return contents


def _floats(generator: np.random.Generator, spec: TensorSpec, count: int) -> npt.NDArray[np.floating]:
    if spec.low is None and spec.high is None:
        return generator.standard_normal(count, np.float64 if spec.dtype in ("f64", "c128") else np.float32)
    low = 0.0 if spec.low is None else spec.low
    return generator.uniform(low, low + 1.0 if spec.high is None else spec.high, count)


def tensor_over(buffer: Any, row: list[Any]) -> torch.Tensor:
    """Return a tensor over shared bytes; the row is ``[byte offset, bytes, dtype, shape, strides, storage offset, device]``."""
    at, nbytes, short, shape, strides, offset, _device = row
    dtype = TORCH_DTYPES[short]
    count = nbytes // dtype.itemsize
    if count == 0:
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(empty.untyped_storage(), 0, shape, strides)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at)
    return flat.set_(flat.untyped_storage(), offset, shape, strides)


def owned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy with storage of its own and the same geometry, as an operator that writes or resizes needs it."""
    storage = tensor.untyped_storage()
    storage = storage.clone() if device in (None, tensor.device) else storage.to(device=device)
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, in order, as bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole memory as bytes, sharing it."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def turned(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Move the floats in a tensor's memory on by some places, round and round; other dtypes stay. Returns the tensor."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if turn and count > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        flat = tensor.as_strided((count,), (1,), 0)
        flat.copy_(flat.roll(turn))
    return tensor
