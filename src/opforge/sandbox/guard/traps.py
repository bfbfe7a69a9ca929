"""Traps in the dispatcher that record a kernel's calls of forbidden ATen operators.

A trap replaces ATen's kernel under every dispatch key that has one. So it sees calls from every
thread, from native code, and through composite operators. It records the call and returns wrong
numbers: a kernel that hides the record is still wrong.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import sysconfig
import warnings
from _thread import get_ident  # like _getframe, bound before any kernel is loaded
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.cases.tensors import flat_bytes
from opforge.ops import Operator, table
from opforge.runtime.aten_kernels import aten_kernel, dispatcher_dump, override
from opforge.runtime.operator_schema import dispatcher_name
from opforge.runtime.trees import instances, leaves
from opforge.sandbox.guard.poison import replace_by_noise
from opforge.sandbox.guard.registrations import HARNESS
from opforge.sandbox.guest.loader import backward

Function = Callable[..., Any]

_KEY_PREFIXES = ("", "Quantized", "Sparse", "SparseCsr", "NestedTensor")
"""Prefixes of a device's dispatch keys. A kernel can convert a tensor to each and compute there."""
_COMPOSITE_KEYS = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
    "CompositeImplicitAutogradNestedTensor",
    "FuncTorchBatchedDecomposition",
)
"""Keys that serve every backend without its own kernel, and are reachable through any of those."""
_ANY_BACKEND = "XLA"
"""A backend without its own kernels: its key leads to the composite kernels."""
_MKLDNN = "MkldnnCPU"
"""Dispatch key of oneDNN tensors.

Torch does not expose the kernels registered there, so a trap cannot forward a call.
"""
_OTHER_NAMESPACES = frozenset({
    "mkldnn", "mkldnn_prepacked", "mkl", "onednn", "quantized", "_quantized", "quantization", "sparse",
    "static_runtime", "prepacked", "xnnpack", "_native", "_test",
})  # fmt: skip
"""Namespaces besides ``aten`` with torch's own implementations of the same operators."""
_MAX_ALWAYS_COMPARED_CALLS = 64
"""Calls with the same geometry whose integers are always compared; later calls are sampled."""
_SAMPLED_SHARE = 1 / 16

_WORD_BYTES = 8
_MIN_DISTINCT_WORDS = 4
"""Compare only with this many distinct values: fewer may equal some integers by chance."""
_NOWHERE = "\0"
"""A prefix of no path."""
_KNOWN = (
    *(f"{package}{os.sep}" for package in (Path(__file__).parents[2], *torch.__path__, *np.__path__)),
    *(f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib")),
    "<frozen ",
)
"""Path prefixes of the harness, Python, torch and NumPy."""

Memory = tuple[int, int]
"""Start and end address of a storage."""


class Traps:
    """The trapped operators of this process, and the recorded calls."""

    def __init__(self, device: str, gradient_callers: tuple[CodeType, ...] = ()) -> None:
        devices = ["CPU"] if device == "cpu" else ["CPU", "CUDA"]
        self._keys = [f"{layout}{name}" for name in devices for layout in _KEY_PREFIXES]
        self._library = torch.library.Library("aten", "IMPL")
        self._others: list[Any] = []
        """Libraries of the other namespaces."""
        self._registrations: dict[str, str] = {}
        """Registrations of each trapped operator, read after its trap was set."""
        self._calls: set[tuple[str, bool]] = set()
        self._main = get_ident()
        self._pid = os.getpid()
        self._children = mmap.mmap(-1, mmap.PAGESIZE)
        """Calls recorded by forked children, in memory shared with this process."""
        self._gradient_callers = gradient_callers
        """Functions that request gradients: the stack above a backward pass of the harness."""
        self._calls_many = device != "cpu"
        """Whether the harness itself calls many operators: it fills timed inputs on the GPU."""
        self._inside = False
        self._given: tuple[Any, ...] = ()
        """Arguments of the kernel's current call."""
        self._integers: list[tuple[str, list[torch.Tensor]]] = []
        """Trapped calls on integers only, within the kernel's current call.

        Their tensors are kept alive so that their memory is not reused.
        """
        self._computed: dict[Any, tuple[int, int]] = {}
        """By argument geometry: digest of the integers from trapped calls, and its update count."""
        self._between = {replace_by_noise.__code__}
        self._trap_code: CodeType | None = None
        self._kernel_callers: set[CodeType] = set()
        """Functions of the harness that do nothing but call kernels."""
        self._folder = _NOWHERE

    def add(self, names: list[str]) -> None:
        """Trap operators. Those without a kernel on this device need no trap."""
        if names and not self._others:
            self._trap_other_namespaces()
        for name in names:
            if name not in self._registrations and (facts := table().get(name)) is not None:
                for key in self._keys:
                    self._set_one(facts, key, key)
                for key in _COMPOSITE_KEYS:
                    if _has_kernel(name, key):
                        self._set_one(facts, key, _ANY_BACKEND)
                if _has_kernel(name, _MKLDNN):
                    override(self._library, facts, self._refusal(dispatcher_name(name)), _MKLDNN)
                self._registrations[name] = dispatcher_dump(facts)

    def _set_one(self, facts: Operator, key: str, original_key: str) -> None:
        """Set a trap at one key. It forwards calls to the kernel at ``original_key``."""
        name = dispatcher_name(facts.name)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", original_key):  # noqa: SLF001
            return
        try:
            original = aten_kernel(facts, original_key)
        except RuntimeError:
            return

        def trap(*args: Any, **kwargs: Any) -> Any:
            if not self._from_kernel(name):
                return original(*args, **kwargs)
            given = list(instances((args, kwargs), torch.Tensor))
            if given and all(t.is_meta for t in given):
                return original(*args, **kwargs)  # computes shapes only
            counts = self._note(name, given)
            result = original(*args, **kwargs)
            if counts:
                return replace_by_noise(result, given, mutates=facts.mutates)
            self._integers.append((name, [*given, *instances(result, torch.Tensor)]))
            return result

        self._trap_code = trap.__code__
        self._between.add(original.__code__)
        override(self._library, facts, trap, key)

    def _trap_other_namespaces(self) -> None:
        """Refuse torch's operators outside ``aten``.

        Kernels have no reason to call them, and they do not dispatch back to ``aten``.
        """
        libraries = {name: torch.library.Library(name, "IMPL") for name in {n for n, _, _ in non_aten_operators()}}
        self._others = list(libraries.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding an existing registration is the purpose
            for namespace, name, key in non_aten_operators():
                refuse = self._refusal(f"{namespace}::{name}")
                libraries[namespace].impl(name, refuse, key, allow_override=True)

    def _refusal(self, name: str) -> Function:
        """Return a trap that records calls and raises."""

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            if self._from_kernel(name):
                self._add(name, counts=True)
            raise RuntimeError(f"{name} is not available in a kernel's process")

        return refuse

    def _from_kernel(self, name: str) -> bool:
        """Whether a trapped call comes from the kernel, by the stack: kernels can change variables.

        Calls that ATen makes to answer a trapped call have only our functions between the two. If
        no frame is the kernel's, a call belongs to the harness if the harness needs the operator,
        or to the gradient formulas that it requests. Otherwise the kernel's native code made it
        later.
        """
        frame = _getframe(1).f_back
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        if frame is not None and frame.f_code is self._trap_code:
            return False
        formula = False
        while frame is not None:
            code = frame.f_code
            if code is _CHECK_CODE:
                return False
            formula |= code is _BACKWARD and _codes_above(frame, len(self._gradient_callers)) == self._gradient_callers
            if code in self._kernel_callers or code.co_filename.startswith(self._folder):
                return True
            if not code.co_filename.startswith(_KNOWN):
                return True  # code compiled from text has no file
            frame = frame.f_back
        if get_ident() != self._main:
            return True
        return not (formula or self._calls_many or dispatcher_name(name).partition(".")[0] in HARNESS)

    def _note(self, name: str, tensors: list[torch.Tensor]) -> bool:
        """Record a call; return whether it is already known to be forbidden."""
        floats = [t for t in instances(self._given, torch.Tensor) if _is_floating(t)]
        counts = any(map(_is_floating, tensors)) or self._reads_floats(tensors) or _are_copied(floats, tensors)
        self._add(name, counts=counts)
        return counts or not floats

    def _reads_floats(self, tensors: list[torch.Tensor]) -> bool:
        """Whether integer tensors share memory with floating-point arguments of the kernel."""
        memory = [m for t in instances(self._given, torch.Tensor) if _is_floating(t) and (m := _memory(t)) is not None]
        return any(_overlap(m, other) for t in tensors if (m := _memory(t)) is not None for other in memory)

    def _add(self, name: str, *, counts: bool) -> None:
        self._calls.add((name, counts))
        if os.getpid() != self._pid:
            self._tell_parent(name, counts)

    def _tell_parent(self, name: str, counts: bool) -> None:
        entry = f"{name}={int(counts)}\n".encode()
        end = self._children.find(b"\0")
        if entry not in self._children[:end] and end + len(entry) < len(self._children):
            self._children[end : end + len(entry)] = entry

    def count_calls(self) -> CallCounter:
        """Return a mode that counts the kernel's operator calls, not the harness's."""
        return CallCounter(lambda: self._inside)

    def set_kernel_folder(self, file: Path) -> None:
        """Set the folder of the kernel's code.

        Some of it may run outside a call of the kernel: a handler, a finaliser.
        """
        self._folder = f"{file.parent}{os.sep}"

    def wrap_kernel(self, kernel: Function) -> Function:
        """Wrap a kernel's function to distinguish calls from within it from the harness's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._given = (args, kwargs)
            self._integers.clear()  # left over from a call that raised
            self._inside = True
            try:
                result = kernel(*args, **kwargs)
            finally:
                self._inside = False
            if self._integers:
                self._check_integers(result)
            self._given = ()  # others may need the memory
            return result

        self._kernel_callers.add(call.__code__)
        return call

    def add_kernel_callers(self, callers: Iterable[CodeType]) -> None:
        """Take trapped calls below these functions of the harness for the kernel's."""
        self._kernel_callers.update(callers)

    @contextlib.contextmanager
    def timing(self, given: tuple[Any, ...]) -> Iterator[None]:
        """Surround calls of a kernel that are not wrapped one by one, with arguments like these."""
        self._given = given
        try:
            yield
        finally:
            self._given = ()
            self._integers.clear()

    def _check_integers(self, result: Any) -> None:
        """Find trapped integer calls that work on copied bytes of the floating-point arguments.

        A kernel's own counting does not use the memory of results, and does not depend on the
        contents of floating-point arguments.
        """
        calls, self._integers = self._integers, []
        memory = [m for t in instances(result, torch.Tensor) if _is_floating(t) and (m := _memory(t)) is not None]
        for name, tensors in calls:
            if any(_overlap(m, other) for t in tensors if (m := _memory(t)) is not None for other in memory):
                self._add(name, counts=True)
        given = list(instances(self._given, torch.Tensor))
        floats = [t.nbytes for t in given if _is_floating(t)]
        worked_on = sum(t.nbytes for _, tensors in calls for t in tensors)
        if floats and worked_on >= min(floats) and not _capturing():
            self._compare(calls, given)

    def _compare(self, calls: list[tuple[str, list[torch.Tensor]]], given: list[torch.Tensor]) -> None:
        """Record calls whose integers changed though only floating-point contents differed."""
        plain = [(t.shape, t.stride(), t.dtype, None if _is_floating(t) else _digest(t)) for t in given]
        geometry = repr((plain, [v for v in leaves(self._given) if not isinstance(v, torch.Tensor)]))
        names = [name for name, _ in calls]
        before, count = self._computed.get(geometry, (None, 0))
        if count > _MAX_ALWAYS_COMPARED_CALLS and random.SystemRandom().random() > _SAMPLED_SHARE:
            return
        digest = hash((*names, *(_digest(tensors[-1]) for _, tensors in calls)))
        if before is not None and before != digest:
            for name in names:
                self._add(name, counts=True)
        self._computed[geometry] = digest, count + 1

    def pop_forbidden_calls(self, *, floats: bool) -> list[str]:
        """Return and clear the calls recorded here and in forked children.

        If a case has floats, calls on integers alone count as a kernel's own counting, unless the
        integers turned out to be bytes of its floats.
        """
        for entry in self._children[: self._children.find(b"\0")].decode().split():
            name, _, number = entry.rpartition("=")
            self._calls.add((name, number == "1"))
        names = sorted({name for name, counts in self._calls if counts or not floats})
        self._calls.clear()
        self._children[:] = bytes(len(self._children))
        return names

    def renew(self, names: list[str]) -> None:
        """Accept what the harness itself has registered for operators since their traps were set."""
        self._registrations.update({name: _registered(name) for name in names})

    def reregistered(self) -> list[str]:
        """Return the trapped operators that something has registered again."""
        return [name.removesuffix(".default") for name, was in self._registrations.items() if _registered(name) != was]

    @property
    def trapped(self) -> frozenset[str]:
        return frozenset(self._registrations)


_BACKWARD = backward.__code__
_CHECK_CODE = Traps._check_integers.__code__  # noqa: SLF001  # the harness's own; it runs after a kernel has returned


def _codes_above(frame: FrameType, count: int) -> tuple[CodeType, ...]:
    """Return the code objects of the frames above this one, nearest first."""
    codes: list[CodeType] = []
    above = frame.f_back
    while above is not None and len(codes) < count:
        codes.append(above.f_code)
        above = above.f_back
    return tuple(codes)


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{dispatcher_name(name)}", key))  # noqa: SLF001


@functools.cache
def non_aten_operators() -> tuple[tuple[str, str, str], ...]:
    """Return namespace, name and key of torch's operators outside ``aten``. Call before forking."""
    full = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]  # noqa: SLF001
    return tuple(
        (namespace, name, key)
        for namespace, _, name in full
        if namespace in _OTHER_NAMESPACES
        for key in ("CPU", "CUDA", "QuantizedCPU", "QuantizedCUDA", _MKLDNN, "CompositeImplicitAutograd")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)  # noqa: SLF001
    )


def _is_floating(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _memory(tensor: torch.Tensor) -> Memory | None:
    """Return the address range of a tensor's storage; None if it has none."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None


def _overlap(one: Memory, other: Memory) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _are_copied(floats: list[torch.Tensor], integers: list[torch.Tensor]) -> bool:
    """Whether integers contain the bits of floating-point numbers, picked at random."""
    if _capturing():
        return False
    for tensor in floats:
        size = min(tensor.element_size(), _WORD_BYTES)
        words = np.unique(flat_bytes(tensor).cpu().numpy().view(f"u{size}"))
        words = words[words != 0]
        if len(words) >= _MIN_DISTINCT_WORDS:
            picked = random.SystemRandom().sample(words.tolist(), min(len(words), 4 * _MIN_DISTINCT_WORDS))
            for other in integers:
                data = flat_bytes(other).cpu().numpy()
                if np.isin(picked, data[: len(data) // size * size].view(f"u{size}")).all():
                    return True
    return False


def _capturing() -> bool:
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _digest(tensor: torch.Tensor) -> int:
    return hash(flat_bytes(tensor).cpu().numpy().tobytes())


def _registered(name: str) -> str:
    facts = table().get(name)
    return "" if facts is None else dispatcher_dump(facts)


class CallCounter(TorchDispatchMode):
    """Counts the ATen calls of this thread while a condition holds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler for the first mode, which takes seconds

    def __init__(self, condition: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._counting = condition
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if self._counting():
            self.calls[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))
