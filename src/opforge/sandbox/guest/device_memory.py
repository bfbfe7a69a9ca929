"""GPU memory shared by two processes through CUDA IPC.

A worker reports where its tensors lie, and the judge maps them into its own context.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from opforge.sandbox.host.reply import MemoryLocation

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class _DeviceBytes:
    """A range of bytes on a GPU that torch can wrap without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


class MemoryLocator:
    """Locates tensors in a form that another process can use.

    Asks the driver once for each allocation, so use one only until an allocation is freed.
    """

    def __init__(self) -> None:
        self._known: list[tuple[int, int, str | None]] = []
        """Start, end and handle of each allocation."""

    def locate(self, tensor: torch.Tensor) -> MemoryLocation | None:
        """Return the place of a tensor's first element; None if no other process can map it."""
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
    """Another process's memory on this process's GPU, mapped until closed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """Address of each mapped allocation, and all of its bytes."""
        self._views: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def tensor_at(self, handle: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return elements in a range of the other process's memory; raise OSError if none."""
        if (memory := self._views.get((handle, dtype))) is None:
            mapped = (self._mapped.get(handle) or self._map(handle))[1]
            memory = self._views[handle, dtype] = mapped[: len(mapped) - len(mapped) % dtype.itemsize].view(dtype)
        first, rest = divmod(offset, dtype.itemsize)
        count = nbytes // dtype.itemsize
        if rest or not 0 <= first <= first + count <= len(memory):
            raise OSError(f"no {count} elements of {dtype} at {offset} in an allocation of {memory.nbytes} bytes")
        return memory[first : first + count]

    def close(self) -> None:
        """Unmap everything; no tensor over it may be used afterwards."""
        torch.cuda.synchronize(self._device)
        mapped, self._mapped, self._views = self._mapped, {}, {}
        for start, _ in mapped.values():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(start))

    def _map(self, handle: str) -> tuple[int, torch.Tensor]:
        start = ctypes.c_uint64()
        try:
            given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        except ValueError:
            raise OSError(f"{handle[:20]!r} is not a memory handle") from None
        torch.cuda.current_stream(self._device)  # creates a context
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(start), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        memory = torch.as_tensor(_DeviceBytes(start.value, _allocation(start.value)[1]), device=self._device)
        self._mapped[handle] = mapping = (start.value, memory)
        return mapping


def _allocation(address: int) -> tuple[int, int]:
    """Return start and size of the allocation that contains an address."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
    return start.value, size.value


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise OSError(f"{name} failed with CUDA error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
