"""Notice which of ATen's operators a kernel calls: the ones that it may not call are trapped in the dispatcher itself.

A trap stands where ATen's kernel stood, under every key that has one, so a call is seen on every thread, from native code,
and through any composite operator that ends in it. It notes the call, and gives the kernel other numbers than ATen's: one
that hides the note is still wrong.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import random
import sysconfig
import warnings
from _thread import get_ident  # as _getframe, bound before any kernel is loaded
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opforge.cases.materialise import flat_bytes
from opforge.ops import Operator, table
from opforge.runtime.facts import qualified
from opforge.runtime.originals import original_of, put, registrations
from opforge.sandbox.loader import backward
from opforge.sandbox.poison import spoiled
from opforge.sandbox.registrations import HARNESS

Function = Callable[..., Any]

_LAYOUTS = ("", "Quantized", "Sparse", "SparseCsr", "NestedTensor")
"""What the dispatch keys of a device begin with: a tensor can be brought into each of these and computed on there."""
_MADE_OF_OTHERS = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
    "CompositeImplicitAutogradNestedTensor",
    "FuncTorchBatchedDecomposition",
)
"""Keys that stand for every backend without a kernel of its own: what is there can be called by way of any of those."""
_ANY_BACKEND = "XLA"
"""A backend without kernels of its own: its key leads to what is made of other operators."""
_MKLDNN = "MkldnnCPU"
"""The key of oneDNN's tensors. Torch does not hand out the kernels that stand there, so a trap cannot pass a call on."""
_OTHER_NAMESPACES = frozenset({
    "mkldnn", "mkldnn_prepacked", "mkl", "onednn", "quantized", "_quantized", "quantization", "sparse", "static_runtime",
    "prepacked", "xnnpack", "_native", "_test",
})  # fmt: skip
"""Namespaces beside ``aten`` in which torch has implementations of the same operators."""
_ALWAYS_COMPARED = 64
"""So many calls with the same geometry are compared by the integers that they compute; of later ones some."""
_LATER_SHARE = 1 / 16

_WORD_BYTES = 8
_FEW_WORDS = 4
"""So many different numbers may be the same as some integers by chance."""
_NOWHERE = "\0"
"""The beginning of no path."""
_KNOWN = (
    *(f"{package}{os.sep}" for package in (Path(__file__).parents[1], *torch.__path__, *np.__path__)),
    *(f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib")),
    "<frozen ",
)
"""Where the harness's own code lies, and that of Python, torch and NumPy."""

Memory = tuple[int, int]
"""Where a storage begins and ends."""


class Traps:
    """The trapped operators of this process, and the calls that were noted."""

    def __init__(self, device: str, asks: tuple[CodeType, ...] = ()) -> None:
        devices = ["CPU"] if device == "cpu" else ["CPU", "CUDA"]
        self._keys = [f"{layout}{name}" for name in devices for layout in _LAYOUTS]
        self._library = torch.library.Library("aten", "IMPL")
        self._others: list[Any] = []
        """The libraries of other namespaces."""
        self._set: dict[str, str] = {}
        """Each trapped operator's registrations, as they were when the trap was set."""
        self._calls: set[tuple[str, bool]] = set()
        self._main = get_ident()
        self._pid = os.getpid()
        self._children = mmap.mmap(-1, mmap.PAGESIZE)
        """What forked children noted: memory that they share with this process."""
        self._asks = asks
        """The functions that ask for gradients: what is on the stack above a backward pass of the harness's own."""
        self._calls_many = device != "cpu"
        """Whether the harness itself calls many operators: on a GPU it makes the contents of timed calls there."""
        self._inside = False
        self._given: tuple[Any, ...] = ()
        """The arguments of the kernel's present call."""
        self._integers: list[tuple[str, list[torch.Tensor]]] = []
        """Trapped calls of the kernel's present call on integers alone: their tensors, which are kept so that their memory is not used again."""
        self._computed: dict[Any, tuple[int, int]] = {}
        """For a geometry of arguments: a digest of the integers that were computed by trapped calls, and how often it was taken."""
        self._between = {spoiled.__code__}
        self._trap_code: CodeType | None = None
        self._call_code: CodeType | None = None
        self._folder = _NOWHERE

    def set(self, names: list[str]) -> None:
        """Trap operators; those that have no kernel on this device cannot be called and need no trap."""
        if names and not self._others:
            self._trap_other_namespaces()
        for name in names:
            if name not in self._set and (facts := table().get(name)) is not None:
                for key in self._keys:
                    self._set_one(facts, key, key)
                for key in _MADE_OF_OTHERS:
                    if _has_kernel(name, key):
                        self._set_one(facts, key, _ANY_BACKEND)
                if _has_kernel(name, _MKLDNN):
                    put(self._library, facts, self._refusal(qualified(name)), _MKLDNN)
                self._set[name] = registrations(facts)

    def _set_one(self, facts: Operator, key: str, original_key: str) -> None:
        """Set a trap at one key. What passes it goes to what stands there, or at another key that leads to the same."""
        name = qualified(facts.name)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", original_key):  # noqa: SLF001
            return
        try:
            original = original_of(facts, original_key)
        except RuntimeError:
            return

        def trap(*args: Any, **kwargs: Any) -> Any:
            if not self._from_kernel(name):
                return original(*args, **kwargs)
            given = list(_tensors((args, kwargs)))
            if given and all(t.is_meta for t in given):
                return original(*args, **kwargs)  # shapes alone
            counts = self._note(name, given)
            result = original(*args, **kwargs)
            if counts:
                return spoiled(result, given, mutates=facts.mutates)
            self._integers.append((name, [*given, *_tensors(result)]))
            return result

        self._trap_code = trap.__code__
        self._between.add(original.__code__)
        put(self._library, facts, trap, key)

    def _trap_other_namespaces(self) -> None:
        """Refuse what torch has beside ``aten``; there is no reason to call it, and it does not come back to ``aten``'s operators."""
        libraries = {name: torch.library.Library(name, "IMPL") for name in {n for n, _, _ in other_operators()}}
        self._others = list(libraries.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that something was there before is the point
            for namespace, name, key in other_operators():
                refuse = self._refusal(f"{namespace}::{name}")
                libraries[namespace].impl(name, refuse, key, allow_override=True)

    def _refusal(self, name: str) -> Function:
        """Return a trap that passes no call on."""

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            if self._from_kernel(name):
                self._add(name, counts=True)
            raise RuntimeError(f"{name} is not to be had in a kernel's process")

        return refuse

    def _from_kernel(self, name: str) -> bool:
        """Whether a trapped call comes from the kernel: by what is on the stack, since any variable is the kernel's to change.

        What ATen calls to answer a trapped call has nothing but our own functions between it and that call. Where no frame
        is the kernel's, a call is the harness's if that needs the operator, or a formula's of the gradients that it asks for;
        else native code of the kernel's made it later.
        """
        frame = _getframe(1).f_back
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        if frame is not None and frame.f_code is self._trap_code:
            return False
        formula = False
        while frame is not None:
            code = frame.f_code
            if code is _LOOKS:
                return False
            formula |= code is _BACKWARD and _codes_above(frame, len(self._asks)) == self._asks
            if code is self._call_code or code.co_filename.startswith(self._folder):
                return True
            if not code.co_filename.startswith(_KNOWN):
                return True  # code that was made of text has no file
            frame = frame.f_back
        if get_ident() != self._main:
            return True
        return not (formula or self._calls_many or qualified(name).partition(".")[0] in HARNESS)

    def _note(self, name: str, tensors: list[torch.Tensor]) -> bool:
        """Note a call; return whether it is known at once to be one that a kernel may not make."""
        floats = [t for t in _tensors(self._given) if _is_floating(t)]
        counts = any(map(_is_floating, tensors)) or self._reads_floats(tensors) or _are_copied(floats, tensors)
        self._add(name, counts=counts)
        return counts or not floats

    def _reads_floats(self, tensors: list[torch.Tensor]) -> bool:
        """Whether integers are in truth the bytes of the floating-point arguments of the kernel's call."""
        memory = [m for t in _tensors(self._given) if _is_floating(t) and (m := _memory(t)) is not None]
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

    def listing(self) -> Listing:
        """Return a mode that counts what the kernel, and not the harness, calls."""
        return Listing(lambda: self._inside)

    def lies_in(self, file: Path) -> None:
        """Say where the kernel's code is, some of which may run when the kernel is not called: a handler, a finaliser."""
        self._folder = f"{file.parent}{os.sep}"

    def watched(self, kernel: Function) -> Function:
        """Return a kernel's function such that calls from within it are told from the harness's own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._given = (args, kwargs)
            self._integers.clear()  # of a call that raised
            self._inside = True
            try:
                result = kernel(*args, **kwargs)
            finally:
                self._inside = False
            if self._integers:
                self._look_at_integers(result)
            self._given = ()  # others may need the memory
            return result

        self._call_code = call.__code__
        return call

    def _look_at_integers(self, result: Any) -> None:
        """Tell a kernel's own counting from work on the bytes of its floating-point arguments, which it has copied.

        Counting does not lie in the memory of results, and it does not depend on what floating-point arguments contain.
        """
        calls, self._integers = self._integers, []
        memory = [m for t in _tensors(result) if _is_floating(t) and (m := _memory(t)) is not None]
        for name, tensors in calls:
            if any(_overlap(m, other) for t in tensors if (m := _memory(t)) is not None for other in memory):
                self._add(name, counts=True)
        given = list(_tensors(self._given))
        floats = [t.nbytes for t in given if _is_floating(t)]
        worked_on = sum(t.nbytes for _, tensors in calls for t in tensors)
        if floats and worked_on >= min(floats) and not _capturing():
            self._compare(calls, given)

    def _compare(self, calls: list[tuple[str, list[torch.Tensor]]], given: list[torch.Tensor]) -> None:
        """Note calls whose integers are others than at an earlier call that differed in floating-point contents alone."""
        plain = [(t.shape, t.stride(), t.dtype, None if _is_floating(t) else _digest(t)) for t in given]
        geometry = repr((plain, [v for v in _leaves(self._given) if not isinstance(v, torch.Tensor)]))
        names = [name for name, _ in calls]
        before, count = self._computed.get(geometry, (None, 0))
        if count > _ALWAYS_COMPARED and random.SystemRandom().random() > _LATER_SHARE:
            return
        digest = hash((*names, *(_digest(tensors[-1]) for _, tensors in calls)))
        if before is not None and before != digest:
            for name in names:
                self._add(name, counts=True)
        self._computed[geometry] = digest, count + 1

    def sprung(self, *, floats: bool) -> list[str]:
        """Return and forget the calls that were noted here and in forked children.

        Where a case has floats, those on integers alone are a kernel's own counting, unless they turned out to be its floats.
        """
        for entry in self._children[: self._children.find(b"\0")].decode().split():
            name, _, number = entry.rpartition("=")
            self._calls.add((name, number == "1"))
        found = sorted({name for name, counts in self._calls if counts or not floats})
        self._calls.clear()
        self._children[:] = bytes(len(self._children))
        return found

    def removed(self) -> list[str]:
        """Return the trapped operators that something has registered anew."""
        return [name.removesuffix(".default") for name, was in self._set.items() if _registered(name) != was]

    @property
    def trapped(self) -> frozenset[str]:
        return frozenset(self._set)


_BACKWARD = backward.__code__
_LOOKS = Traps._look_at_integers.__code__  # noqa: SLF001  # our own, which runs when a kernel has returned


def _codes_above(frame: FrameType, count: int) -> tuple[CodeType, ...]:
    """Return the code of the frames that led to this one, the nearest first."""
    found: list[CodeType] = []
    above = frame.f_back
    while above is not None and len(found) < count:
        found.append(above.f_code)
        above = above.f_back
    return tuple(found)


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{qualified(name)}", key))  # noqa: SLF001


@functools.cache
def other_operators() -> tuple[tuple[str, str, str], ...]:
    """Return namespace, name and key of what torch has beside ``aten``. Ask once before forking."""
    full = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]  # noqa: SLF001
    return tuple(
        (namespace, name, key)
        for namespace, _, name in full
        if namespace in _OTHER_NAMESPACES
        for key in ("CPU", "CUDA", "QuantizedCPU", "QuantizedCUDA", _MKLDNN, "CompositeImplicitAutograd")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)  # noqa: SLF001
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in nested arguments or results."""
    if isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_leaves, value))
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_leaves, value.values()))
    else:
        yield value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (v for v in _leaves(value) if isinstance(v, torch.Tensor))


def _is_floating(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _memory(tensor: torch.Tensor) -> Memory | None:
    """Return where a tensor's storage lies; None for one that has none."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None


def _overlap(one: Memory, other: Memory) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _are_copied(floats: list[torch.Tensor], integers: list[torch.Tensor]) -> bool:
    """Whether integers contain the bits of some floating-point numbers, picked at random."""
    if _capturing():
        return False
    for tensor in floats:
        size = min(tensor.element_size(), _WORD_BYTES)
        words = np.unique(flat_bytes(tensor).cpu().numpy().view(f"u{size}"))
        words = words[words != 0]
        if len(words) >= _FEW_WORDS:
            picked = random.SystemRandom().sample(words.tolist(), min(len(words), 4 * _FEW_WORDS))
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
    return "" if facts is None else registrations(facts)


class Listing(TorchDispatchMode):
    """Counts the ATen calls of this thread, while something holds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler when the first mode is made, which takes seconds

    def __init__(self, counting: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._counting = counting
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if self._counting():
            self.calls[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))
