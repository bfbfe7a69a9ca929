"""Create a case's tensors from stored contents or a seed, with the same bytes in any process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opforge.cases.values import TensorSpec
from opforge.cases.wire import TORCH_DTYPES

Bytes = npt.NDArray[np.uint8]
_INT_HIGH = 10
WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOISE_STARTS = 1 << 16
"""Start positions in the noise, besides the rotations of the elements."""
_MAX_CPU_BATCH_ELEMENTS = 1 << 20
"""Elements renewed at once."""
_MAX_GPU_BATCH_ELEMENTS = 1 << 25


def write_storage(spec: TensorSpec, target: Bytes, blob: Bytes | None, seed: str) -> None:
    """Fill ``target``, which has the size of the spec's storage, with the contents of a tensor."""
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


def tensor_from_row(buffer: Any, row: list[Any]) -> torch.Tensor:
    """Return a tensor over shared bytes.

    The row is ``[byte offset, bytes, dtype, shape, strides, storage offset, device]``.
    """
    start, nbytes, short, shape, strides, offset, _device = row
    dtype = TORCH_DTYPES[short]
    count = nbytes // dtype.itemsize
    if count == 0:
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(empty.untyped_storage(), 0, shape, strides)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    return flat.set_(flat.untyped_storage(), offset, shape, strides)


def one_tensor_per_offset(
    make: Callable[[list[Any]], torch.Tensor], known: dict[int, torch.Tensor] | None = None
) -> Callable[[list[Any]], torch.Tensor]:
    """Wrap a function that makes tensors from rows; rows at one byte offset share a tensor, which ``known`` keeps."""
    known = {} if known is None else known

    def tensor(row: list[Any]) -> torch.Tensor:
        start, nbytes, *_ = row
        if not nbytes:
            return make(row)
        if start not in known:
            known[start] = make(row)
        return known[start]

    return tensor


def owned_copy(tensor: torch.Tensor, device: torch.device | None = None, *, ahead: bool = False) -> torch.Tensor:
    """Return a copy with its own storage and the same geometry, as writing or resizing needs.

    With ``ahead`` a copy to a GPU is queued: torch otherwise waits for all that is queued there before it. The driver
    has read the memory when the call returns.
    """
    given = flat_storage(tensor)
    memory = torch.empty_like(given, device=device or tensor.device)
    memory.copy_(given, non_blocking=ahead and memory.is_cuda)
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, in order, as bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    if left is right:
        return True
    word_dtype = WORD_DTYPES.get(left.element_size())
    if word_dtype is None or not (_is_stored_plainly(left) and _is_stored_plainly(right)):
        return bool(torch.equal(flat_bytes(left), flat_bytes(right)))
    return bool(torch.equal(left.detach().view(word_dtype), right.detach().view(word_dtype)))


def same_on_host(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of bytes are equal, found without work for a GPU that others use too."""
    return bool(np.array_equal(one.cpu().numpy(), other.cpu().numpy()))


def _is_stored_plainly(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, with no conjugation or negation pending."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or in complex128 if it is complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as bytes, without a copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def renewed(tensor: torch.Tensor, seed: int, *, positions: bool = False) -> torch.Tensor:
    """Replace a tensor's contents by others of the same kind, and return the tensor.

    The same seed gives the same contents in any process.
    """
    words = words_of(tensor)
    if seed and len(words):
        words.copy_(Renewal(words, tensor.dtype, positions=positions, only=seed).contents([seed])[0])
    return tensor


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's storage as integers of its element size; complex elements are halved."""
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    nbytes = tensor.untyped_storage().nbytes()
    return flat_storage(tensor)[: nbytes - nbytes % size].view(WORD_DTYPES[size])


class Renewal:
    """Other contents of the same kind: elements move, and floats shrink by up to an eighth.

    Zeros stay zeros and keep their number, and numbers that are not finite stay. Everything is
    computed on integers, so that every device gets the same bits. With ``positions`` integers may
    be indices, and stay. With ``only`` no other seed is asked for, and needs no noise.
    """

    def __init__(
        self, words: torch.Tensor, dtype: torch.dtype, *, positions: bool = False, only: int | None = None
    ) -> None:
        self.words = words
        self._count = len(words)
        floats = dtype.is_floating_point or dtype.is_complex
        self._unchanged = not self._count or (positions and not floats and dtype != torch.bool)
        if self._unchanged:
            return
        starts = range(_NOISE_STARTS + 1) if only is None else range((start := _noise_start(only)), start + 1)
        self._first_start = starts[0]
        places = torch.arange(starts[0], starts[-1] + self._count, device=words.device)
        around = _cyclic_range(words, starts[0], len(places))
        noise = _pseudorandom(around, places.to(words.dtype))
        changes = None
        if floats:
            real = dtype.to_real() if dtype.is_complex else dtype
            info = torch.finfo(real)
            mantissa = round(-math.log2(info.eps))
            size = words & torch.iinfo(words.dtype).max
            largest = int(torch.tensor(info.max, dtype=real).view(words.dtype))
            noise &= (1 << max(1, mantissa - 3)) - 1
            changes = (size >= 2 << mantissa) & (size <= largest)
        elif dtype != torch.bool:
            noise = around * (noise & 1)
            changes = words != 0
        self._exchanges = not floats
        self._noise = noise
        # doubled, so that each rotation is a contiguous range
        self._doubled_words = torch.cat((words, words))
        self._changes_all = changes is not None and bool(changes.all())
        """Whether every element may change; else those that do have all bits set in ``_changes``."""
        if not self._changes_all:
            mask = torch.zeros_like(words) if changes is None else changes.to(words.dtype).neg_()
            self._changes = torch.cat((mask, mask))

    def contents(self, seeds: list[int]) -> list[torch.Tensor]:
        """Return the contents for each seed."""
        if self._unchanged:
            return [self.words] * len(seeds)
        batch_size = max(1, (_MAX_GPU_BATCH_ELEMENTS if self.words.is_cuda else _MAX_CPU_BATCH_ELEMENTS) // self._count)
        results: list[torch.Tensor] = []
        for batch in (seeds[start : start + batch_size] for start in range(0, len(seeds), batch_size)):
            starts = [self._count - seed % self._count for seed in batch]
            moved, taken = self._rows([starts, [_noise_start(seed) - self._first_start for seed in batch]])
            first, noise = self._memory_ranges(self._doubled_words, moved), self._memory_ranges(self._noise, taken)
            changes = None if self._changes_all else self._memory_ranges(self._changes, moved)
            if self._exchanges:
                noise = noise if changes is None else noise & changes
                results += torch.where(noise != 0, noise, first).unbind()
            else:
                results += (first - (noise if changes is None else noise & changes)).unbind()
        return results

    def _rows(self, starts: list[list[int]]) -> list[Any]:
        """Return range starts as numbers; for many on a GPU, as tensors copied there at once."""
        if not self.words.is_cuda or len(starts[0]) == 1:
            return starts
        return list(torch.tensor(starts).to(self.words.device, non_blocking=True).unbind())

    def _memory_ranges(self, memory: torch.Tensor, starts: Any) -> torch.Tensor:
        """Return ranges of memory, each as long as the contents, as rows."""
        if isinstance(starts, torch.Tensor):
            return memory.unfold(0, self._count, 1).index_select(0, starts)
        rows = [memory[start:][: self._count] for start in starts]  # faster than indexing
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _noise_start(seed: int) -> int:
    return seed // 7 % _NOISE_STARTS


def _cyclic_range(words: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Return a range of words that begins anew behind the last one; copied in pieces, which is faster than by index."""
    pieces = [words[start % len(words) :][:length]]
    whole, rest = divmod(length - len(pieces[0]), len(words))
    return torch.cat([*pieces, words.repeat(whole), words[:rest]])


def _pseudorandom(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return pseudorandom numbers: overflowing products, upper halves folded in, twice."""
    half, mixed = 4 * words.element_size(), words + places
    for factor in (0x2545F491, 0x9E3779B1):
        mixed.add_(77).mul_(torch.tensor(factor).to(words.dtype))
        mixed ^= mixed >> half
    return mixed
