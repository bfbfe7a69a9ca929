"""Make the tensors of a case: the same bytes in any process, from stored contents or from a seed."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opforge.cases.encoding import TORCH_DTYPES
from opforge.cases.values import TensorSpec

Bytes = npt.NDArray[np.uint8]
_INT_HIGH = 10
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20
"""Elements that are renewed at once."""


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


def renewed(tensor: torch.Tensor, seed: int, *, positions: bool = False) -> torch.Tensor:
    """Give a tensor's memory other contents of the same kind, the same ones for the same seed in any process. Returns the tensor.

    With ``positions`` integers may be indices, and stay.
    """
    words = words_of(tensor)
    if seed and len(words):
        words.copy_(renewed_words(words, tensor.dtype, [seed], positions=positions)[0])
    return tensor


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole memory as integers of its elements' size, of the parts' size where they are complex."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    nbytes = tensor.untyped_storage().nbytes()
    return flat_storage(tensor)[: nbytes - nbytes % size].view(_WORDS[size])


def renewed_words(words: torch.Tensor, dtype: torch.dtype, seeds: list[int], *, positions: bool) -> list[torch.Tensor]:
    """Return contents of the same kind as some memory's, for each seed: elements change places, and floats lose up to an eighth of their size.

    Zeros stay zeros and as many, and what is not finite stays. All is done on integers, so that every device gets the same bits.
    """
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    if dtype.is_complex or dtype.is_floating_point:
        change = functools.partial(_smaller, dtype=dtype.to_real() if dtype.is_complex else dtype)
    elif dtype == torch.bool:
        change = _as_they_are
    elif positions:
        return [words] * len(seeds)
    else:
        change = _exchanged
    count = len(words)
    twice, numbers = torch.cat((words, words)), torch.arange(count, device=words.device)
    places = numbers.to(words.dtype)
    at_once = max(1, _AT_ONCE // count)
    made: list[torch.Tensor] = []
    for some in (seeds[at : at + at_once] for at in range(0, len(seeds), at_once)):
        first, second = (_moved(twice, numbers, steps) for steps in (some, [seed // 3 + 1 for seed in some]))
        drawn = torch.tensor(some, device=words.device)[:, None].to(words.dtype)
        made += change(first, second, _scrambled(second, places, drawn)).unbind()
    return made


def _moved(twice: torch.Tensor, numbers: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Return rows in which elements have moved on by so many places, round and round, from memory that holds them twice."""
    starts = [len(numbers) - step % len(numbers) for step in steps]
    if twice.is_cuda:
        return twice[numbers + torch.tensor(starts, device=twice.device)[:, None]]
    return torch.stack([twice[start:][: len(numbers)] for start in starts])  # faster than by an index


def _scrambled(words: torch.Tensor, places: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return numbers that cannot be foretold without the seed: products that run over, their upper halves folded in, twice."""
    half, mixed = 4 * words.element_size(), words + places + seed
    for _ in range(2):
        mixed *= 2 * seed + 1
        mixed ^= mixed >> half
    return mixed


def _smaller(first: torch.Tensor, _second: torch.Tensor, drawn: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Take some units in the last place from floats that are neither tiny nor beyond all numbers."""
    info = torch.finfo(dtype)
    mantissa = round(-math.log2(info.eps))
    largest = int(torch.tensor(info.max, dtype=dtype).view(first.dtype))
    size = first & torch.iinfo(first.dtype).max
    return torch.where(
        (size >= 2 << mantissa) & (size <= largest), first - (drawn & ((1 << max(1, mantissa - 3)) - 1)), first
    )


def _exchanged(first: torch.Tensor, second: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Take every other integer, as chance has it, from another place; zeros stay, so that they are as many."""
    return torch.where(((drawn & 4) != 0) & (first != 0) & (second != 0), second, first)


def _as_they_are(first: torch.Tensor, _second: torch.Tensor, _drawn: torch.Tensor) -> torch.Tensor:
    return first
