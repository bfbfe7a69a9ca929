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


def place_of(tensor: torch.Tensor) -> Place | None:
    """Return where a tensor's first element lies, as another process can find it; None where none can."""
    address = tensor.data_ptr()
    if not tensor.is_cuda or not address:
        return "", address
    handle = _Handle()
    try:
        start, _ = _allocation(address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    except OSError:
        return None
    return bytes(handle).hex(), address - start


class MappedMemory:
    """Memory of another process on the GPU of this one, mapped for as long as this lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[str, tuple[int, int]] = {}

    def stretch(self, handle: str, offset: int, nbytes: int) -> torch.Tensor:
        """Return some bytes of the other process as a tensor; raises OSError where it has none there."""
        start, size = self._mapped.get(handle) or self._map(handle)
        if not 0 <= offset <= offset + nbytes <= size:
            raise OSError(f"{nbytes} bytes at {offset} are not within the {size} of the allocation")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Stretch(start + offset, nbytes), device=self._device)

    def close(self) -> None:
        """Give all of it back; no tensor over it may be used from now on."""
        torch.cuda.synchronize(self._device)
        mapped, self._mapped = self._mapped, {}
        for start, _ in mapped.values():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(start))

    def _map(self, handle: str) -> tuple[int, int]:
        start = ctypes.c_uint64()
        try:
            given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        except ValueError:
            raise OSError(f"{handle[:20]!r} is no handle of memory") from None
        torch.cuda.current_stream(self._device)  # there is a context from here on
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(start), given, ctypes.c_uint(_ON_FIRST_ACCESS))
        self._mapped[handle] = found = (start.value, _allocation(start.value)[1])
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
