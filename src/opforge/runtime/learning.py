"""Learn launch plans for kernels in Python, from the geometry of their calls.

A call only notes its geometry. The plan is made later, with tensors of the same geometry and other
contents: the kernel is recorded twice, and its plan is replayed on several contents. A plan is used
only if both recordings are equal, and every replay equals the kernel's own result bit for bit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .aten_kernels import NUMBER_TYPES
from .native.binding import NativeLibrary
from .native.launch_plan import KernelLaunch, LaunchPlan, NoPlanError
from .native.recording import PlanRecorder, record
from .operator_schema import OperatorSchema
from .results import check_result_types
from .trees import instances, map_instances

LEARN = {
    "background": "a thread of its own makes launch plans for calls that were seen",
    "request": "launch plans are made when `learn()` is called",
    "never": "launch plans are neither made nor loaded",
}
DEVICE_TYPES = {"cuda"}
"""Devices whose kernels can have launch plans."""
_ALIGNMENT = 16
_SHIFT = 3 * _ALIGNMENT
_POISONS = (0xA5, 0x5A, 0xFF)
"""Bytes with which a replay's memory is filled before it, one for each comparison."""
_MAX_QUEUED = 1024
_MAX_PLANS_OF_GEOMETRY = 8
"""Plans that C++ keeps for a geometry; they differ in modes and in numbers."""
_ALL_NOTED, _NOTED_SHARE = 64, 1 / 16
"""How many calls without a plan are all noted, and which share of the later ones.

These are chosen at random: models repeat their calls, so every sixteenth could be the same one each time.
"""
_MAX_LEARNED = 4
"""How often a call gets a plan before it is no longer noted."""
_NOTHING_TO_LEARN = "opforge: nothing to learn"
"""What C++ raises if a call that is made to learn has a plan already, or is not for a kernel in Python."""
_MAX_FAILURES = 4
"""Geometries without a plan after which a kernel that has none at all is not tried again."""
_END_S = 10.0
"""How long the end of the interpreter waits for a plan that is being made."""
_MEMORY_SHARE = 8
"""A call is too large if its tensors would take more than this part of the free memory."""


@dataclass
class KernelPlans:
    """Launch plans of one kernel, and why other geometries have none."""

    learn: str = "never"
    handles: dict[int, LaunchPlan] = field(default_factory=dict)
    """Plans by their handles in C++."""
    refused: Counter[str] = field(default_factory=Counter)
    not_loaded: Counter[str] = field(default_factory=Counter)
    """Why saved plans are not used."""
    store: int = 0
    """The place in C++ where plans are found by geometry; 0 if there is none."""
    runs: int = 0
    """Calls that Python answered."""
    noted: set[str] = field(default_factory=set)
    """Calls that were noted and have not got a plan, or cannot."""
    learned: Counter[str] = field(default_factory=Counter)
    """How often calls got a plan. Calls in another mode need another one."""
    noted_by_geometry: Counter[str] = field(default_factory=Counter)
    """Calls that were noted and differ in their numbers only."""

    @property
    def hopeless(self) -> bool:
        """Whether the kernel seems to have no plans at all."""
        return not self.handles and self.refused.total() >= _MAX_FAILURES


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """The geometry of a tensor, and how its memory lies to that of the call's other tensors."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    requires_grad: bool
    memory: int
    """Number of the memory, which several tensors of a call may share."""
    offset: int
    """Bytes from the start of the memory, as far as the kernel may depend on them."""
    number: int
    """Number of the tensor: a call may have the very same one twice."""
    inference: bool
    """Whether it was made in inference mode."""

    @property
    def extent(self) -> int:
        """Return the bytes from the start of the memory to the tensor's end."""
        if 0 in self.sizes:
            return self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        itemsize: int = self.dtype.itemsize
        return self.offset + (last + 1) * itemsize


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A call without the contents of its tensors: each tensor is a TensorGeometry."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad_mode: bool
    inference_mode: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallSpec:
        numbers: dict[int, int] = {}
        first: dict[int, torch.Tensor] = {}
        """The tensor that begins first in each memory."""
        for tensor in instances([args, kwargs], torch.Tensor):
            if _start(tensor) <= _start(first.setdefault(_memory(tensor), tensor)):
                first[_memory(tensor)] = tensor
        bases = {memory: (number, _base(tensor)) for number, (memory, tensor) in enumerate(first.items())}

        def spec(tensor: torch.Tensor) -> TensorGeometry:
            number, base = bases[_memory(tensor)]
            return TensorGeometry(
                tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad,
                number, _start(tensor) - base, numbers.setdefault(id(tensor), len(numbers)), tensor.is_inference(),
            )  # fmt: skip

        return cls(
            map_instances(args, torch.Tensor, spec), map_instances(dict(kwargs), torch.Tensor, spec),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        )  # fmt: skip

    @property
    def tensors(self) -> list[TensorGeometry]:
        return list(instances([self.args, self.kwargs], TensorGeometry))

    def without_numbers(self) -> str:
        """Return what the call has in common with those that differ in their numbers only."""
        values = [*self.args, *self.kwargs, *self.kwargs.values(), self.grad_mode, self.inference_mode]
        return repr([type(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for v in values])

    def make(self, shift: int = 0) -> SyntheticCall:
        """Return a call with the same geometry.

        Tensors that begin somewhere in their memory begin ``shift`` bytes later: a geometry does not say where.
        """
        memories: list[torch.Tensor] = []
        shifts: list[int] = []
        for number in range(1 + max((t.memory for t in self.tensors), default=-1)):
            sharing = [t for t in self.tensors if t.memory == number]
            if len({t.dtype for t in sharing}) > 1:
                raise NoPlanError("tensors of different dtypes share memory")
            if min(t.offset for t in sharing) < 0 or any(t.offset % t.dtype.itemsize for t in sharing):
                raise NoPlanError("a tensor does not begin at a whole element of its memory")
            shifts.append(shift if all(t.offset for t in sharing) else 0)
            elements = -(-(max(t.extent for t in sharing) + shifts[-1]) // sharing[0].dtype.itemsize)
            with torch.inference_mode(sharing[0].inference):
                memories.append(torch.empty(elements, dtype=sharing[0].dtype, device=sharing[0].device))
        made: dict[int, torch.Tensor] = {}

        def tensor(spec: TensorGeometry) -> torch.Tensor:
            if spec.number not in made:
                offset = (spec.offset + shifts[spec.memory]) // spec.dtype.itemsize
                view = memories[spec.memory].as_strided(spec.sizes, spec.strides, offset)
                made[spec.number] = view.requires_grad_(requires_grad=True) if spec.requires_grad else view
            return made[spec.number]

        with torch.inference_mode(self.inference_mode):
            args = map_instances(self.args, TensorGeometry, tensor)
            kwargs = map_instances(self.kwargs, TensorGeometry, tensor)
        sizes = [size for t in self.tensors if t.dtype.is_floating_point for size in t.sizes]
        limits = [*sizes, *instances([self.args, self.kwargs], int)]  # such as the rows of an embedding
        return SyntheticCall(args, kwargs, memories, min((n for n in limits if n > 0 and n is not True), default=1))

    def check_size(self) -> None:
        """Raise NoPlanError if tensors of this size would take too much of the memory."""
        for device in {t.device for t in self.tensors if t.device.type == "cuda"}:
            free, _total = torch.cuda.mem_get_info(device)
            if sum(t.extent for t in self.tensors if t.device == device) > free // _MEMORY_SHARE:
                raise NoPlanError("the call's tensors are too large to make others like them")


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch has no public name for it


def _start(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of its memory to a tensor."""
    return int(tensor.storage_offset() * tensor.element_size())


def _base(tensor: torch.Tensor) -> int:
    """Return where a memory begins if only what a kernel may depend on is kept of its first tensor's place in it."""
    start = _start(tensor)
    return start - (tensor.data_ptr() % _ALIGNMENT or _ALIGNMENT) if start else 0


@dataclass
class SyntheticCall:
    """A call with tensors of its own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    memories: list[torch.Tensor]
    bound: int
    """Integers in tensors are smaller: they may be positions in others."""

    def fill(self, seed: int) -> None:
        """Give the tensors other contents: floats from 0 to 1 or, with odd seeds, around 0; and small integers."""
        for number, memory in enumerate(self.memories):
            generator = torch.Generator(memory.device).manual_seed(1000 * seed + number)
            if memory.dtype.is_floating_point or memory.dtype.is_complex:
                wide = memory.dtype if memory.dtype.is_complex or memory.dtype.itemsize > 1 else torch.float32
                draw = torch.randn if seed % 2 else torch.rand
                values = draw(memory.shape, dtype=wide, device=memory.device, generator=generator)
                with torch.inference_mode():  # it allows writes to all tensors
                    memory.copy_(values)
            else:
                bound = 2 if memory.dtype == torch.bool else self.bound
                with torch.inference_mode():
                    memory.random_(0, bound, generator=generator)


class _LearningThread(threading.local):
    learning: _Learning | None = None


_this_thread = _LearningThread()
_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel whose function is in plans."""

    name: str
    cubin: bytes
    """Empty if the GPU is not one of NVIDIA's."""
    owner: Any = None
    """Triton's object. The function is loaded as long as it lives."""


COMPILED: dict[int, CompiledKernel] = {}
"""Compiled kernels by the driver's function."""


@dataclass
class _Learning:
    """The making of one plan, while the call that it is for is being answered."""

    op: OperatorSchema
    call: SyntheticCall
    shifted: SyntheticCall
    """A call of the same geometry, with tensors elsewhere in their memory."""
    library: NativeLibrary

    def answer(
        self,
        plans: KernelPlans,
        function: Callable[..., Any],
        aten: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer the call by a kernel's function, and offer a plan for calls like it; without a plan, by ATen."""
        self.call.fill(0)
        try:
            result = function(*args, **kwargs)  # compiles, and settles what is tuned
            check_result_types(self.op, result)
            handle, plan = self._make_plan(function, args, kwargs)
        except NoPlanError as error:
            plans.refused[str(error)] += 1
        except Exception as error:  # noqa: BLE001  # kernels raise anything
            plans.refused[f"it raised {type(error).__name__} on other contents: {error}"] += 1
        else:
            plans.handles[handle] = plan
            self.library.offer_plan(handle)
            return result
        return aten(*args, **kwargs)

    def _make_plan(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, LaunchPlan]:
        self.call.fill(1)
        plan = self._record(function, args, kwargs)
        self.shifted.fill(2)
        args, kwargs = self.shifted.args, self.shifted.kwargs
        if self._record(function, args, kwargs) != plan:
            raise NoPlanError("it did not do the same in two runs of the same geometry")
        if not plan.steps and plan.allocations:
            raise NoPlanError("it launches nothing")
        if not has_tensor_results(self.op, plan):
            raise NoPlanError("its results are not one tensor for each that the operator returns")
        handle = self.library.make_plan(plan.encode())
        inputs = [t if t is not None else torch.zeros((), device="cpu") for t in self._inputs(args, kwargs)[0]]
        for seed, poison in enumerate(_POISONS, start=3):
            self.shifted.fill(seed)
            expected = _bits([function(*args, **kwargs), self.shifted.memories])
            self.shifted.fill(seed)
            actual = _bits([self.library.replay(inputs, handle, poison), self.shifted.memories])
            if len(expected) != len(actual) or not all(map(_equal, expected, actual)):
                raise NoPlanError("its replay differs from the kernel")
        return handle, plan

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LaunchPlan:
        inputs, written = self._inputs(args, kwargs)
        recorder = PlanRecorder(inputs, written, next(t.device for t in inputs if t is not None))
        plan = record(function, args, kwargs, recorder)
        launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        for launch, kernel in zip(launches, recorder.kernels, strict=True):
            COMPILED[launch.function] = CompiledKernel(kernel.name, kernel.asm.get("cubin", b""), kernel)
        return plan

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor | None], list[bool]]:
        """Return the call's tensors as C++ sees them, and which are written; None stands for a number."""
        inputs: list[torch.Tensor | None] = []
        written: list[bool] = []
        for position, argument in enumerate(self.op.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if "Tensor" in argument.type and isinstance(value, NUMBER_TYPES):
                inputs.append(None)
            else:
                inputs += instances(value, torch.Tensor)
            written += [argument.writes] * (len(inputs) - len(written))
        device = next((t.device for t in inputs if t is not None and t.device.type in DEVICE_TYPES), None)
        if device is None or any(t is not None and t.device != device for t in inputs):
            raise NoPlanError("its tensors are on several devices")
        return inputs, written


class KernelWithPlans(Protocol):
    """A kernel that may have launch plans."""

    plans: KernelPlans


class SlotLike(Protocol):
    """An operator's slot in C++."""

    op: OperatorSchema
    library: NativeLibrary

    @property
    def kernels(self) -> Sequence[KernelWithPlans]:
        """Return the installed kernels."""
        ...


_Noted = tuple[SlotLike, KernelPlans, CallSpec, str]


class Learner:
    """Notes calls, and makes launch plans for them."""

    def __init__(self) -> None:
        self._queue: list[_Noted] = []
        self._working: list[_Noted] = []
        """Calls for which a thread is making a plan."""
        self.begin()

    def begin(self) -> None:
        """Begin without threads, also in a forked child, which lacks those that may hold the lock."""
        self._changed = threading.Condition()
        self._queue, self._working = [*self._working, *self._queue], []
        self._thread: threading.Thread | None = None
        self._ending = False
        self._random = random.Random()  # noqa: S311  # the program's own random numbers stay as they are

    def note(self, slot: SlotLike, plans: KernelPlans, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a call of a kernel that has no plan for it."""
        if plans.learn == "never" or plans.hopeless or len(plans.noted) + len(plans.learned) >= _MAX_QUEUED:
            return
        plans.runs += 1
        if plans.runs > _ALL_NOTED and self._random.random() > _NOTED_SHARE:  # noting takes as long as a short kernel
            return
        spec = CallSpec.of(args, kwargs)
        if not any(t.device.type in DEVICE_TYPES for t in spec.tensors):
            return
        key, geometry = repr(spec), spec.without_numbers()
        with self._changed:
            if key in plans.noted or plans.learned[key] >= _MAX_LEARNED:
                return
            if plans.noted_by_geometry[geometry] >= _MAX_PLANS_OF_GEOMETRY:
                return
            plans.noted_by_geometry[geometry] += 1
            plans.noted.add(key)
            self._queue.append((slot, plans, spec, key))
            if plans.learn == "background" and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="opforge: launch plans", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def learn(self, timeout: float | None = None) -> None:
        """Make plans for all calls noted so far, in this thread; wait for those that another thread makes."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("launch plans cannot be made while a CUDA graph is captured; call learn() before it")
        limit = None if timeout is None else time.monotonic() + timeout
        while limit is None or time.monotonic() < limit:
            with self._changed:
                if not self._queue:
                    left = None if limit is None else limit - time.monotonic()
                    self._changed.wait_for(lambda: not self._working, left)
                    return
                item = self._take()
            self._make(item)

    def stop(self) -> None:
        """End the thread before the interpreter ends; a plan that is being made is finished."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_END_S)

    def _work(self) -> None:
        with _relaxed_capture():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._first_in_background() is not None or self._ending)
                    if self._ending or (first := self._first_in_background()) is None:
                        return
                    item = self._take(first)
                self._make(item)

    def _first_in_background(self) -> int | None:
        """Return which call the thread may make a plan for; others are made on request."""
        return next((i for i, (_, plans, *_) in enumerate(self._queue) if plans.learn == "background"), None)

    def _take(self, position: int = 0) -> _Noted:
        self._working.append(self._queue.pop(position))
        return self._working[-1]

    def _make(self, item: _Noted) -> None:
        try:
            _learn_one(*item)
        finally:
            with self._changed:
                self._working.remove(item)
                self._changed.notify_all()


LEARNER = Learner()
atexit.register(LEARNER.stop)
os.register_at_fork(after_in_child=LEARNER.begin)


def has_tensor_results(op: OperatorSchema, plan: LaunchPlan) -> bool:
    """Whether a plan has one result for each of an operator's, and each is a tensor."""
    return len(plan.results) == len(op.returns) and all(result.type == "Tensor" for result in op.returns)


def learning_here() -> _Learning | None:
    """Return what this thread is learning; None if its calls are ordinary ones."""
    return _this_thread.learning


def _learn_one(slot: SlotLike, plans: KernelPlans, spec: CallSpec, key: str) -> None:
    if not any(kernel.plans is plans for kernel in slot.kernels):  # it was disabled
        return
    before = len(plans.handles)
    try:
        spec.check_size()
        with _side_stream(spec), torch.inference_mode(spec.inference_mode), torch.set_grad_enabled(spec.grad_mode):
            _this_thread.learning = learning = _Learning(slot.op, spec.make(), spec.make(_SHIFT), slot.library)
            slot.library.set_learning(1)
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # autograd refuses to write leaves
                _operator(slot.op)(*learning.call.args, **learning.call.kwargs)
    except NoPlanError as error:
        plans.refused[str(error)] += 1
    except Exception as error:  # noqa: BLE001  # a plan is never worth an error
        if _NOTHING_TO_LEARN not in str(error):
            plans.refused[f"{type(error).__name__}: {error}"] += 1
    finally:
        _this_thread.learning = None
        slot.library.set_learning(0)
    if len(plans.handles) > before:
        plans.learned[key] += 1
        plans.noted.discard(key)


@contextlib.contextmanager
def _side_stream(spec: CallSpec) -> Iterator[None]:
    """Work on a stream of its own, so that other work does not wait; wait for it at the end."""
    device = next((t.device for t in spec.tensors if t.device.type == "cuda"), None)
    if device is None:
        yield
        return
    with torch.cuda.device(device):
        stream = _streams.setdefault(device, torch.cuda.Stream())  # one for all: each keeps memory of its own
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread allocate memory while another one captures a CUDA graph."""
    if torch.cuda.is_available():
        relaxed = ctypes.c_int(2)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    yield


def _operator(op: OperatorSchema) -> Any:
    base, _, overload = op.name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload)


def _bits(value: Any) -> list[torch.Tensor | None]:
    """Return copies of all tensors in a value, as bytes with their geometry."""
    if value is None:
        return [None]
    if isinstance(value, torch.Tensor):
        shape = torch.tensor([*value.shape, *value.stride(), value.element_size()])
        row = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return [shape, row.view(torch.uint8)]
    return [item for part in value for item in _bits(part)]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
