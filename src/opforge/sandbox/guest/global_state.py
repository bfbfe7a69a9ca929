"""Global state of torch and Python that a kernel must not change."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import random
import signal
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.utils import _device

_GENERATORS = {
    "rng": "the random number generator was advanced",
    "python_rng": "Python's random number generator was advanced",
    "numpy_rng": "NumPy's random number generator was advanced",
}
"""Generators that random operators must advance, and others must not."""


class GlobalState(NamedTuple):
    """A snapshot of the global state."""

    default_dtype: torch.dtype
    threads: int
    grad_mode: bool
    inference_mode: bool
    deterministic: bool
    matmul_precision: str
    autocast: bool
    default_device: str
    cudnn: tuple[bool, bool, bool]
    """Whether cuDNN is enabled, benchmarks, and may use TF32."""
    modes: tuple[int, int]
    """Number of active torch-function and torch-dispatch modes."""
    pinned_L2_bytes: int  # noqa: N815  # name shown in the verdict
    """L2 cache that the current stream has set aside on the GPU.

    The device's limit is no sign: the driver changes it itself.
    """
    denormals: bool
    """Whether denormals are kept, not flushed to zero."""
    onednn: bool
    garbage_collection: bool
    interrupt: object
    """The handler of Ctrl-C."""
    rng: bytes
    python_rng: object
    numpy_rng: bytes

    @classmethod
    def now(cls) -> GlobalState:
        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            str(_device.CURRENT_DEVICE),
            (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
            (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),  # noqa: SLF001
            _pinned_l2_bytes(),
            sys.float_info.min / 2 != 0,
            torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),  # noqa: SLF001
            gc.isenabled(),
            signal.getsignal(signal.SIGINT),
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            _numpy_state(),
        )

    def changes_since(self, before: GlobalState, *, rng: bool) -> list[str]:
        """Describe changes since an earlier snapshot.

        ``rng`` includes the generators; it is False for random operators.
        """
        if self == before:
            return []
        names = [n for n in self._fields if getattr(self, n) != getattr(before, n)]
        changes = [f"{n}: {getattr(before, n)} became {getattr(self, n)}" for n in names if n not in _GENERATORS]
        return changes + [_GENERATORS[n] for n in names if rng and n in _GENERATORS]

    def restore(self) -> None:
        """Restore the state, so that the next case starts clean."""
        while torch._C._len_torch_function_stack() > self.modes[0]:  # noqa: SLF001  # no public function for it
            torch._C._pop_torch_function_stack()  # noqa: SLF001
        while torch._C._len_torch_dispatch_stack() > self.modes[1]:  # noqa: SLF001
            torch._C._pop_torch_dispatch_stack()  # noqa: SLF001
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad_mode)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:  # the first call imports for seconds
            torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_enabled("cuda", self.autocast)
        torch.set_default_device(None if self.default_device == "None" else self.default_device)
        torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = self.cudnn
        if _pinned_l2_bytes() != self.pinned_L2_bytes and (runtime := _cuda_runtime()) is not None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            runtime.cudaStreamSetAttribute(stream, _ACCESS_POLICY_WINDOW, ctypes.byref(_Window()))
        torch.set_flush_denormal(not self.denormals)
        torch._C._set_mkldnn_enabled(self.onednn)  # noqa: SLF001
        (gc.enable if self.garbage_collection else gc.disable)()
        signal.signal(signal.SIGINT, self.interrupt)  # type: ignore[arg-type]  # as it was read
        torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
        random.setstate(self.python_rng)  # type: ignore[arg-type]  # as it was read
        if (address := _numpy_state_address()) is not None and self.numpy_rng:
            ctypes.memmove(address, self.numpy_rng, _MT19937_BYTES)


_MT19937_BYTES = 4 * 624 + 4
"""The generator's words, and its position among them."""


def _numpy_state_address() -> int | None:
    """Return the address of the state of NumPy's global generator.

    None if a program has replaced the generator.
    """
    # A generator's own state property takes 0.2 ms. The stubs lack this public function.
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else None


def _numpy_state() -> bytes:
    address = _numpy_state_address()
    return b"" if address is None else ctypes.string_at(address, _MT19937_BYTES)


_ACCESS_POLICY_WINDOW = 1


class _Window(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("ratio", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )


@functools.cache
def _cuda_runtime() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


def _pinned_l2_bytes() -> int:
    """Return the size of the current stream's L2 window; torch neither reads nor sets it."""
    if not torch.cuda.is_initialized() or (runtime := _cuda_runtime()) is None:
        return 0
    window = _Window()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    failed = runtime.cudaStreamGetAttribute(stream, _ACCESS_POLICY_WINDOW, ctypes.byref(window))
    return 0 if failed else int(window.nbytes)


def start_device(device: torch.device) -> None:
    """Start CUDA, which takes a process 0.2 s the first time."""
    if device.type == "cuda" and not torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # the first call that needs it says what is wrong
            torch.empty(1, device=device)


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed the generator that operators on a device draw from.

    Without a GPU ``torch.manual_seed`` formats a stack trace for a later start of CUDA: thirty
    times the work.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def generator_state(device: torch.device) -> bytes:
    """Return the state of the generators that operators on a device draw from.

    For a GPU this includes the CPU's generator, because some operators get CPU tensors.
    """
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return b"".join(state.numpy().tobytes() for state in states)
