"""A GPU's driver where there is none: Triton compiles as for a GPU, and blocks are C functions with the kernels' names."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from opforge.runtime.native.recording import number_bits

KERNELS = {
    "neg": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["count"])
def scaled(source, target, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * factor, mask=at < count)

def neg_kernel_impl(self):
    if not self.is_contiguous():
        raise NotImplementedError("rows with gaps")
    target = torch.empty_like(self)
    if self.numel():
        scaled[(triton.cdiv(self.numel(), 64),)](self, target, self.numel(), -1.0, BLOCK=64)
    return target
""",
    "mul": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["count"])
def scaled(source, target, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * factor, mask=at < count)

def mul_kernel_impl(self, other):
    other = torch.tensor(other) if not torch.is_tensor(other) else other
    if torch.result_type(self, other) != torch.float32 or other.dim() or not self.is_contiguous():
        raise NotImplementedError("tensors, or rows with gaps")
    flat = self.view(-1)
    target = torch.empty(flat.shape)
    scaled[(triton.cdiv(flat.numel(), 64),)](flat, target, flat.numel(), float(other), BLOCK=64)
    return target.view(self.shape)
""",
    "add": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["count", "left_stride", "right_stride"])
def strided_sum(left, right, target, count, left_stride, right_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sum = tl.load(left + at * left_stride, mask=inside) + tl.load(right + at * right_stride, mask=inside)
    tl.store(target + at, tl.load(target + at, mask=inside) + sum, mask=inside)

def add_kernel_impl(self, other, *, alpha=1):
    if not torch.is_tensor(other) or self.shape != other.shape or self.dim() != 1 or alpha != 1:
        raise NotImplementedError("rows only")
    target = self.new_zeros(self.shape)
    strided_sum[(triton.cdiv(self.numel(), 64),)](
        self, other, target, self.numel(), self.stride(0), other.stride(0), BLOCK=64)
    return target
""",
    "clamp": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["count"])
def clamped(source, target, count, low, high, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < count)
    value = tl.where(value < low, low, tl.where(value > high, high, value))
    tl.store(target + at, value, mask=at < count)

def clamp_kernel_impl(self, min=None, max=None):
    if not self.is_contiguous() or self.dtype != torch.float32 or (min is None and max is None):
        raise NotImplementedError("rows with gaps")
    target = torch.empty_like(self)
    low, high = float("-inf") if min is None else float(min), float("inf") if max is None else float(max)
    clamped[(triton.cdiv(self.numel(), 64),)](self, target, self.numel(), low, high, BLOCK=64)
    return target
""",
    "add_": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["count", "target_stride", "source_stride"])
def strided_add_to(target, source, count, target_stride, source_stride, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(target + at * target_stride, mask=at < count)
    value += factor * tl.load(source + at * source_stride, mask=at < count)
    tl.store(target + at * target_stride, value, mask=at < count)

def add__kernel_impl(self, other, *, alpha=1):
    if not torch.is_tensor(other) or self.shape != other.shape or self.dim() != 1 or not self.stride(0):
        raise NotImplementedError("rows only")
    strided_add_to[(triton.cdiv(self.numel(), 64),)](
        self, other, self.numel(), self.stride(0), other.stride(0), float(alpha), BLOCK=64)
    return self
""",
    "native_layer_norm": """
import torch, triton
import triton.language as tl

@triton.jit(do_not_specialize=["columns", "given"])
def row_norm(source, weight, bias, target, mean, deviation, columns, given, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(source + row * columns + at, mask=inside, other=0)
    average = tl.sum(value) / columns
    scale = tl.rsqrt(tl.sum(tl.where(inside, (value - average) * (value - average), 0)) / columns + eps)
    result = (value - average) * scale
    if given & 1:
        result *= tl.load(weight + at, mask=inside)
    if given & 2:
        result += tl.load(bias + at, mask=inside)
    tl.store(target + row * columns + at, result, mask=inside)
    tl.store(mean + row, average)
    tl.store(deviation + row, scale)

def native_layer_norm_kernel_impl(input, normalized_shape, weight, bias, eps):
    columns = input.shape[-1]
    tensors = [t for t in (input, weight, bias) if t is not None]
    if input.dim() != 2 or list(normalized_shape) != [columns] or not all(t.is_contiguous() for t in tensors):
        raise NotImplementedError("rows only")
    target = torch.empty_like(input)
    mean, deviation = (input.new_empty(input.shape[0], 1) for _ in range(2))
    given = (weight is not None) + 2 * (bias is not None)
    row_norm[(input.shape[0],)](
        input, input if weight is None else weight, input if bias is None else bias, target, mean, deviation,
        columns, given, eps, BLOCK=256)
    return target, mean, deviation
""",
}
"""Kernels that are right, in Triton."""


def build(folder: Path) -> Path:
    """Build the stand-in for libcuda."""
    library = folder / "libstandin.so"
    compiler = shutil.which("gcc") or shutil.which("cc") or "g++"
    command = [compiler, "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_name("standin.c")), "-ldl"], check=True)
    return library


MODULE = 1
"""What the stand-in calls the module of each of its kernels. Drivers have addresses there."""


class AfterStandIn:
    """Triton's own driver again, but for the kernels that the stand-in has loaded.

    Triton 3.9 unloads a kernel when it is collected, by the driver that is active then.
    """

    def __init__(self) -> None:
        self.utils = _UtilsAfterStandIn()

    def __getattr__(self, name: str) -> Any:
        return getattr(driver.default, name)


class _UtilsAfterStandIn:
    def unload_module(self, module: int) -> None:
        if module != MODULE:
            driver.default.utils.unload_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(driver.default.utils, name)


class Driver:
    """As much of a GPU's driver as Triton needs to compile and launch."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.cuLaunchKernel.argtypes = [
            ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self.utils = self
        self.launcher_cls = self._launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, _cubin: bytes, _shared: int, _device: int) -> tuple[int, int, int, int, int]:
        return MODULE, ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0, 32, 0, 1024

    def unload_module(self, _module: int) -> None:
        """Triton 3.9 calls it. The functions are those of the stand-in itself, and stay."""

    def _launcher(self, source: Any, _metadata: Any) -> Any:
        kinds = list(source.signature.values())

        def launch(gx: int, gy: int, gz: int, stream: int, function: int, packed: Any, *given: Any) -> None:
            values = [
                ctypes.c_uint64(value.data_ptr() if kind.startswith("*") else number_bits(kind, value))
                for kind, value in zip(kinds, given[3:], strict=True)
                if kind != "constexpr"
            ]
            parameters = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
            error = self.library.cuLaunchKernel(
                function, gx, gy, gz, 32 * packed[0], 1, 1, packed[2], stream, parameters, None
            )
            assert error == 0

        return launch
