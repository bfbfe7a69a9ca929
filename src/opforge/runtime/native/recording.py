"""Record what a kernel in Python does: memory it allocates, fills and copies, and Triton kernels it launches.

A kernel that does anything else that matters has no plan. Operators that launch nothing, such as
views and questions about metadata, do not matter.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..trees import instances  # noqa: TID252  # packages carry these files under another name
from .launch_plan import (
    Allocation,
    Copy,
    Fill,
    FillValue,
    KernelLaunch,
    LaunchPlan,
    NoPlanError,
    Pointer,
    Result,
    Step,
    View,
)

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_FILLED = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0), **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}  # fmt: skip
"""Operators that allocate a tensor and fill it with a number."""
_FILLED_WITH_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2}
"""Those that take the number, with its position."""
_COPIES = frozenset({"clone", "_to_copy"})
"""Operators that allocate a tensor and copy another one to it. ``contiguous`` and ``to`` call them."""
_ABOUT_METADATA = frozenset({
    "result_type", "can_cast", "is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
    "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size", "stride", "numel", "dim",
    "layout", "device",
})  # fmt: skip
"""Operators that read no memory. Views are recognised by their results."""
_MAX_INPUTS = 16
"""Tensors of a call of which a geometry says whether they share memory; kMaxCompared in geometry.h."""
_ADAPTERS = __name__.removesuffix("native.recording") + "adapters"
_READS_ADDRESSES = frozenset({"data_ptr", "untyped_storage", "storage", "__dlpack__", "numpy"})
_ORDINARY_FLOATS = {"fp32": "<f", "fp64": "<d", "fp16": "<e"}
_INTEGER_BITS = {
    "i1": 8, "u1": 8, "i8": 8, "u8": 8, "i16": 16, "u16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64,
}  # fmt: skip
_patch_lock = threading.Lock()
os.register_at_fork(after_in_child=_patch_lock._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


class _RecordingThread(threading.local):
    recorder: PlanRecorder | None = None


_this_thread = _RecordingThread()


class PlanRecorder:
    """Records one run of a kernel."""

    def __init__(self, inputs: Sequence[torch.Tensor | None], written: Sequence[bool], device: torch.device) -> None:
        """Record a run on tensors. ``inputs`` has None for a tensor that Python sees as a number."""
        if len(inputs) > _MAX_INPUTS:
            raise NoPlanError(
                f"it takes more than {_MAX_INPUTS} tensors, and only these are compared for shared memory"
            )
        self._inputs, self._written, self._device = inputs, written, device
        self._allocated: list[torch.Tensor] = []
        self._steps: list[Step] = []
        self.kernels: list[Any] = []
        """Compiled kernels. Their functions are loaded as long as they live."""

    def plan(self, results: Any) -> LaunchPlan:
        """Return the plan, given what the kernel returned."""
        returned = tuple(results) if isinstance(results, list | tuple) else (results,)
        allocations = tuple(Allocation(t.dtype, tuple(t.shape), t.stride()) for t in self._allocated)
        return LaunchPlan(
            self._device, len(self._inputs), allocations, tuple(self._steps), tuple(map(self._result, returned))
        )

    def observe_operator(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take note of a call of an operator; raise NoPlanError if it may launch something."""
        name = operator.name().partition("::")[2].partition(".")[0]
        made = list(instances(result, torch.Tensor))
        if name in _EMPTY:
            self._add_allocation(made[0])
        elif name in _FILLED or name in _FILLED_WITH_ARGUMENT:
            if self._add_allocation(made[0]):
                self._add_fill(made[0], args[_FILLED_WITH_ARGUMENT[name]] if name not in _FILLED else _FILLED[name])
        elif name in ("zero_", "fill_") and self._is_tracked(args[0]):
            self._add_fill(args[0], args[1] if name == "fill_" else 0)
        elif name in _COPIES and self._is_tracked(args[0]) and made[0].device == self._device:
            self._add_allocation(made[0])
            self._add_copy(made[0], args[0])
        elif name == "copy_" and self._is_tracked(args[0]) and self._is_tracked(args[1]):
            self._add_copy(args[0], args[1])
        elif name not in _ABOUT_METADATA:
            given = list(instances([args, kwargs], torch.Tensor))
            if made and not operator._schema.is_mutable and _are_views(made, given):  # noqa: SLF001
                return
            if any(map(self._is_tracked, given)) or any(t.device.type not in ("cpu", "meta") for t in (*given, *made)):
                raise NoPlanError(f"it calls {operator.name()}, which may launch a kernel of its own")

    def observe_launch(self, kernel: Any, given: Sequence[Any]) -> None:
        """Take note of a launch by Triton, with the arguments of its launcher."""
        *grid, stream, function, packed, _metadata, enter, leave = given[:9]
        if grid[0] * grid[1] * grid[2] <= 0:
            return
        metadata = kernel.metadata
        for hook in (enter, leave):
            if getattr(hook, "calls", hook):
                raise NoPlanError("hooks watch the launches of Triton")
        if len(packed) != 3 or packed[1] != 1:
            raise NoPlanError("it launches clusters of blocks")
        for feature in ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, feature, 0):
                raise NoPlanError(f"its Triton kernel {kernel.name} has {feature}, which plans do not have")
        if self._device.type == "cuda" and stream != torch.cuda.current_stream(self._device).cuda_stream:
            raise NoPlanError("it launches on a stream of its own")
        values = [
            self._argument(kind, value)
            for kind, value in zip(kernel.src.signature.values(), given[9:], strict=True)
            if kind != "constexpr"
        ]
        self.kernels.append(kernel)
        threads = 32 * packed[0]
        self._steps.append(KernelLaunch(function, (grid[0], grid[1], grid[2]), threads, packed[2], (*values, 0, 0)))

    def _argument(self, kind: Any, value: Any) -> Pointer | int:
        if not isinstance(kind, str):
            raise NoPlanError("its Triton kernel takes a tuple")
        if kind.startswith("*"):
            tensor = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
            if value is None:
                return 0
            if not isinstance(tensor, torch.Tensor):
                raise NoPlanError(f"it passes {type(value).__name__} as a pointer, not a tensor")
            return self._pointer(tensor)
        return number_bits(kind, value)

    def _pointer(self, tensor: torch.Tensor) -> Pointer | int:
        """Return where a tensor begins, relative to a tensor of the call or to an allocation."""
        if not tensor.numel():
            return 0
        address, memory = _address(tensor), _memory(tensor)
        for index, made in enumerate(self._allocated):
            if _memory(made) == memory:
                return Pointer(allocated=True, index=index, offset=address - _memory_start(made))
        sharing = [i for i, t in enumerate(self._inputs) if t is not None and t.numel() and _memory(t) == memory]
        if not sharing:
            raise NoPlanError("it uses memory that is neither the call's nor newly allocated")
        index = min(sharing, key=lambda i: abs(address - self._input_address(i)))
        written = any(self._written[i] for i in sharing)
        return Pointer(allocated=False, index=index, offset=address - self._input_address(index), written=written)

    def _input_address(self, index: int) -> int:
        tensor = self._inputs[index]
        return 0 if tensor is None else _address(tensor)

    def _add_allocation(self, tensor: torch.Tensor) -> bool:
        """Add memory that the kernel allocates. Returns whether it is the device's."""
        if tensor.device != self._device:
            if tensor.device.type not in ("cpu", "meta"):
                raise NoPlanError(f"it allocates memory on {tensor.device}, and the call is for {self._device}")
            return False  # if it reaches a launch, that is refused
        self._allocated.append(tensor)
        return True

    def _add_fill(self, tensor: torch.Tensor, value: Any) -> None:
        if not tensor.numel():
            return
        target = self._written_view(tensor)
        size = tensor.numel() * tensor.element_size()
        is_whole = bool(self._allocated) and tensor is self._allocated[-1] and tensor.untyped_storage().nbytes() == size
        is_zero = type(value) in (bool, int, float) and value == 0 and not str(value).startswith("-")
        if is_zero and (is_whole or tensor.is_contiguous()):
            self._steps.append(Fill(target.place, size))
        else:
            self._steps.append(FillValue.of(target, value))

    def _add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel():
            self._steps.append(Copy(self._written_view(target), self._view(source)))

    def _view(self, tensor: torch.Tensor) -> View:
        """Return a tensor relative to the call's or to an allocation."""
        place = self._pointer(tensor)
        if isinstance(place, int) or tensor.is_conj() or tensor.is_neg():
            raise NoPlanError("it copies or fills a view that is empty, conjugated or negated")
        return View(place, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _written_view(self, tensor: torch.Tensor) -> View:
        view = self._view(tensor)
        if not view.place.allocated and not view.place.written:
            raise NoPlanError("it writes an argument that the operator only reads")
        return view

    def _result(self, value: Any) -> Result | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise NoPlanError(f"it returns {type(value).__name__}, not a tensor")
        if value.is_conj() or value.is_neg() or value.device != self._device:
            raise NoPlanError("it returns a view that is conjugated or negated, or a tensor on another device")
        memory = _memory(value)
        for index, made in enumerate(self._allocated):
            if _memory(made) == memory:
                return Result(True, index, *_geometry(value))
        for index, given in enumerate(self._inputs):
            if given is not None and _memory(given) == memory and _geometry(given) == _geometry(value):
                return Result(False, index, value.dtype, 0, tuple(value.shape), value.stride())
        raise NoPlanError("it returns memory that is neither an argument of the call nor newly allocated")

    def _is_tracked(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        memory = _memory(value)
        return any(t is not None and _memory(t) == memory for t in (*self._inputs, *self._allocated))


class _WatchOperators(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    def __init__(self, recorder: PlanRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func):  # what matters is what it calls: below autograd, torch does not show that
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))  # noqa: SLF001
        result = func(*args, **(kwargs or {}))
        self._recorder.observe_operator(func, args, kwargs or {}, result)
        return result


def _is_composite(operator: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001  # torch has no public name for it
    name = operator.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not any(has_kernel(name, key) for key in ("CPU", "CUDA"))


class _WatchAddresses(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """Refuses kernels that ask where tensors are: their answer holds for one call only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_ADDRESSES and not _asked_by_triton_or_us():
            raise NoPlanError(f"it calls Tensor.{name}, and addresses differ from call to call")
        return func(*args, **(kwargs or {}))


def _asked_by_triton_or_us() -> bool:
    frame = sys._getframe(2)  # noqa: SLF001  # the caller of the tensor's method
    asker = frame.f_globals.get("__name__", "")
    # Triton binds arguments in functions that it makes with exec, which have no module
    # Adapters compare the addresses of a call's tensors, which Plan::replay compares again
    return asker.partition(".")[0] == "triton" or asker in (__name__, _ADAPTERS) or "JITCallable" in frame.f_globals


def record(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    recorder: PlanRecorder,
) -> LaunchPlan:
    """Run a kernel and return its plan; raise NoPlanError if it has no plan."""
    with _watched_launches(recorder), _WatchAddresses(), _WatchOperators(recorder):
        result = function(*args, **kwargs)
    return recorder.plan(result)


@contextlib.contextmanager
def _watched_launches(recorder: PlanRecorder) -> Iterator[None]:
    """Let a recorder see the launches of this thread."""
    compiled = getattr(sys.modules.get("triton.compiler.compiler"), "CompiledKernel", None)
    if compiled is None:
        raise NoPlanError("it does not use Triton")
    with _patch_lock:
        original = compiled.__dict__.get("run")
        if not isinstance(original, property) or original.fget is None:
            raise NoPlanError("this version of Triton launches kernels in another way")
        launcher_of = original.fget

        def run(kernel: Any) -> Any:
            launcher = launcher_of(kernel)
            active = _this_thread.recorder
            if active is None:
                return launcher

            def launch(*given: Any) -> Any:
                active.observe_launch(kernel, given)
                with torch._C.DisableTorchFunction():  # noqa: SLF001  # launchers read addresses
                    return launcher(*given)

            return launch

        compiled.run = property(run)
        _this_thread.recorder = recorder
        try:
            yield
        finally:
            _this_thread.recorder = None
            compiled.run = original


def number_bits(kind: str, value: Any) -> int:
    """Return a number as Triton passes it to a kernel, as 64 bits with zeros above."""
    if (bits := _INTEGER_BITS.get(kind)) is not None:
        return int(value) & ((1 << bits) - 1)
    if kind == "bf16":
        return int.from_bytes(struct.pack("<f", float(value)), "little") >> 16
    if (layout := _ORDINARY_FLOATS.get(kind)) is not None:
        return int.from_bytes(struct.pack(layout, float(value)), "little")
    raise NoPlanError(f"its Triton kernel takes an argument of the type {kind}")


def _geometry(tensor: torch.Tensor) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _are_views(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether all results are in memory of the arguments. Schemas do not tell: ``contiguous`` may copy."""
    memories = {_memory(t) for t in given}
    return all(_memory(t) in memories for t in made)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # noqa: SLF001  # torch has no public name for it
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _memory_start(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return int(tensor.untyped_storage().data_ptr())


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        return int(tensor.data_ptr())
