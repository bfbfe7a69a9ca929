"""Memory of a GPU that two processes see (CUDA IPC): a worker says where its tensors lie, and the judge maps them into its own context."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_HANDLE_BYTES = 64
_ON_FIRST_ACCESS = 1
Place = tuple[str, int]
"""A handle in hexadecimal digits and an offset; for memory of the host no handle, and an address."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class _Stretch:
    """Some bytes on a GPU, as torch takes them in without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


class Finder:
    """Finds where tensors lie, as another process can find it. The driver is asked once for each allocation: use one as long as none is freed."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int, str | None]] = []
        """Where each allocation begins and ends, and its handle."""

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor's first element lies; None where no other process can find it."""
        address = tensor.data_ptr()
        if not tensor.is_cuda or not address:
            return "", address
        start, _, handle = next((a for a in self._known if a[0] <= address < a[1]), None) or self._ask(address)
        return None if handle is None else (handle, address - start)

    def _ask(self, address: int) -> tuple[int, int, str | None]:
        handle = _Handle()
        try:
            start, size = _allocation(address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        except OSError:
            return address, address, None
        self._known.append((start, start + size, bytes(handle).hex()))
        return self._known[-1]


class MappedMemory:
    """Memory of another process on the GPU of this one, mapped for as long as this lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """Where each allocation was mapped to, and all of its bytes."""
        self._views: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def stretch(self, handle: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return elements of the other process, as many as some bytes hold; raises OSError where it has none there."""
        if (memory := self._views.get((handle, dtype))) is None:
            whole = (self._mapped.get(handle) or self._map(handle))[1]
            memory = self._views[handle, dtype] = whole[: len(whole) - len(whole) % dtype.itemsize].view(dtype)
        first, rest = divmod(offset, dtype.itemsize)
        count = nbytes // dtype.itemsize
        if rest or not 0 <= first <= first + count <= len(memory):
            raise OSError(f"no {count} elements of {dtype} at {offset} in an allocation of {memory.nbytes} bytes")
        return memory[first : first + count]

    def close(self) -> None:
        """Give all of it back; no tensor over it may be used from now on."""
        torch.cuda.synchronize(self._device)
        mapped, self._mapped, self._views = self._mapped, {}, {}
        for start, _ in mapped.values():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(start))

    def _map(self, handle: str) -> tuple[int, torch.Tensor]:
        start = ctypes.c_uint64()
        try:
            given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        except ValueError:
            raise OSError(f"{handle[:20]!r} is no handle of memory") from None
        torch.cuda.current_stream(self._device)  # there is a context from here on
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(start), given, ctypes.c_uint(_ON_FIRST_ACCESS))
        memory = torch.as_tensor(_Stretch(start.value, _allocation(start.value)[1]), device=self._device)
        self._mapped[handle] = found = (start.value, memory)
        return found


def _allocation(address: int) -> tuple[int, int]:
    """Return where the allocation begins that an address lies in, and its size."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
    return start.value, size.value


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise OSError(f"{name} failed with CUDA error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
