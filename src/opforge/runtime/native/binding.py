"""Load the native runtime's library, and check that it fits the running torch."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..value_ranges import NumberLimits  # noqa: TID252  # packages carry these files under another name
from . import torch_layout
from .building import NAMESPACE, NativeError, build

ABI = 4
"""Version of the library's functions, as in runtime.cpp."""
MAX_OUTCOMES = 64
_ORDINARY_SHARED_BYTES = 48 << 10
"""Shared memory that a kernel may use without asking."""
_PREFER_SHARED, _MAX_DYNAMIC_SHARED_SIZE = 1, 8
"""CU_FUNC_CACHE_PREFER_SHARED and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
PASS, SERVE, RUN = range(3)
"""What a slot does with a call: ATen's kernel, a C++ kernel, or a Python kernel."""
_DTYPES = {torch.int16: 2, torch.float32: 6, torch.float64: 7}
"""Torch's numbers of dtypes, which its files have too and which never change."""
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "opforge_abi": (ctypes.c_int, ()),
    "opforge_error": (ctypes.c_char_p, ()),
    "opforge_torch_version": (ctypes.c_char_p, ()),
    "opforge_layout": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
    "opforge_register_operators": (ctypes.c_int, ()),
    "opforge_slot": (ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)),
    "opforge_install": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)),
    "opforge_remove": (ctypes.c_int, (ctypes.c_void_p,)),
    "opforge_set_rules": (
        ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    ),
    "opforge_add_outcome": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p),
    ),
    "opforge_read_counts": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p)),
    "opforge_geometries": (ctypes.c_int64, (ctypes.c_void_p,)),
    "opforge_searches": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "opforge_set_inside": (None, (ctypes.c_int,)),
    "opforge_set_learning": (None, (ctypes.c_int,)),
    "opforge_load_driver": (ctypes.c_int, (ctypes.c_char_p,)),
    "opforge_make_plan": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int64)),
    "opforge_offer_plan": (None, (ctypes.c_void_p,)),
    "opforge_new_plan_store": (ctypes.c_void_p, ()),
    "opforge_store_plan": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    "opforge_plan_key": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    "opforge_replays": (ctypes.c_uint64, (ctypes.c_void_p,)),
    "opforge_plan_is_broken": (ctypes.c_int, (ctypes.c_void_p,)),
}  # fmt: skip


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Load a library; raise NativeError if it does not fit this torch."""
        try:
            self._library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path} cannot be loaded ({error}); delete it to build it again") from None
        self._check_fit(path)
        self._operators = torch.library.Library(NAMESPACE, "FRAGMENT")
        self.define("describe", "(Tensor[] given) -> int[]")
        self.define("replay", "(Tensor[] given, int plan, int poison) -> Tensor?[]")
        self._call("opforge_register_operators")
        self.describe = getattr(torch.ops, NAMESPACE).describe
        """Returns how the library sees a list of tensors: as words."""
        self.replay = getattr(torch.ops, NAMESPACE).replay
        """Replays a launch plan on tensors, in memory that is filled with a byte first."""
        self._driver = ""
        self.set_inside = self._library.opforge_set_inside
        """Says whether this thread is inside a kernel."""
        self.set_learning = self._library.opforge_set_learning
        """Says whether this thread's calls are made to learn a plan. They are not counted."""

    def define(self, name: str, schema: str, function: Any = None, key: str = "") -> None:
        """Define an operator that C++ can call, with a function in Python for a dispatch key."""
        try:
            self._operators.define(name + schema)
            if function is not None:
                self._operators.impl(name, function, key)
        except RuntimeError as error:  # other code has defined it
            raise NativeError(f"{NAMESPACE}::{name} cannot be defined: {str(error).splitlines()[0]}") from None

    def slot(self, operator: str, key: str) -> Slot:
        """Return the slot of an operator such as ``aten::add.Tensor`` for a dispatch key."""
        name, _, overload = operator.partition(".")
        handle = self._library.opforge_slot(name.encode(), overload.encode(), int(key != "CPU"))
        if handle is None:
            raise NativeError(self._error())
        return Slot(self, handle)

    def load_driver(self, path: str = "libcuda.so.1") -> None:
        """Load the CUDA driver, with which plans are replayed; raise NativeError if there is none."""
        if path != self._driver:
            self._call("opforge_load_driver", path.encode())
            self._driver = path

    def make_plan(self, words: list[int]) -> int:
        """Return the handle of a launch plan, which lives as long as the process."""
        handle: int | None = self._library.opforge_make_plan((ctypes.c_int64 * len(words))(*words), len(words))
        if handle is None:
            raise NativeError(self._error())
        return handle

    def offer_plan(self, handle: int) -> None:
        """Offer a plan for calls like the one that this thread is answering."""
        self._library.opforge_offer_plan(handle)

    def new_plan_store(self) -> int:
        """Return a place for the plans of a kernel, which lives as long as the process."""
        return int(self._library.opforge_new_plan_store())

    def store_plan(self, store: int, handle: int, key: Sequence[int]) -> None:
        """Add a plan for calls with a key, as ``plan_key`` returns it."""
        self._call("opforge_store_plan", store, handle, (ctypes.c_uint64 * len(key))(*key), len(key))

    def plan_key(self, handle: int) -> tuple[int, ...]:
        """Return the calls that a plan is for: modes, numbers and the words of the geometry; empty if for none."""
        key = (ctypes.c_uint64 * self._library.opforge_plan_key(handle, None, 0))()
        self._library.opforge_plan_key(handle, key, len(key))
        return tuple(key)

    def load_kernel(self, cubin: bytes, name: str, shared: int, device: int) -> int:
        """Load a compiled kernel into the driver for a device; return its function, which stays loaded."""
        context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._drive("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._drive("cuCtxPushCurrent_v2", context)
        try:
            self._drive("cuModuleLoadData", ctypes.byref(module), cubin)
            self._drive("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            if shared > _ORDINARY_SHARED_BYTES:  # as Triton does it
                self._drive("cuFuncSetCacheConfig", function, _PREFER_SHARED)
                self._drive("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE, shared)
        finally:
            self._drive("cuCtxPopCurrent_v2", ctypes.byref(context))
        return function.value or 0

    def _drive(self, function: str, *arguments: Any) -> None:
        error = getattr(ctypes.CDLL(self._driver), function)(*arguments)
        if error:
            raise NativeError(f"the CUDA driver refused {function} with error {error}")

    def replays(self, handle: int) -> int:
        """Return how often a plan was replayed for calls."""
        return int(self._library.opforge_replays(handle))

    def is_broken(self, handle: int) -> bool:
        """Whether the driver has refused a plan."""
        return bool(self._library.opforge_plan_is_broken(handle))

    def _check_fit(self, path: Path) -> None:
        built_for = self._library.opforge_torch_version().decode()
        if (abi := self._library.opforge_abi()) != ABI:
            raise NativeError(f"{path} has functions of version {abi}, not {ABI}; delete it to build it again")
        numbers = re.match(r"\d+\.\d+\.", torch.__version__)  # a prebuilt library is for all of 2.13.x
        if numbers is None or not built_for.startswith(numbers[0]):
            raise NativeError(
                f"{path} was built for torch {built_for}, and this is {torch.__version__}; delete it to build it again"
            )
        facts = (ctypes.c_int64 * 32)()
        self.layout = layout = tuple(facts[: self._library.opforge_layout(facts, len(facts))])
        if not torch_layout.fits(layout):
            raise NativeError(f"the layout of torch {torch.__version__} is not known {layout}; update opforge")

    def _call(self, function: str, *arguments: Any) -> int:
        """Call a function of the library; raise NativeError if it fails."""
        result: int = getattr(self._library, function)(*arguments)
        if result < 0:
            raise NativeError(self._error())
        return result

    def _error(self) -> str:
        text: str = self._library.opforge_error().decode(errors="replace")
        return text


@dataclass(frozen=True, slots=True)
class Slot:
    """An operator's native slot for one dispatch key. It lives as long as the process."""

    library: NativeLibrary
    handle: int

    def install(self, name: str) -> None:
        """Take the place of ATen's kernel, with the operators ``decide_NAME`` and so on as Python's part."""
        self.library._call("opforge_install", self.handle, name.encode())  # noqa: SLF001

    def remove(self) -> None:
        """Restore the dispatcher."""
        self.library._call("opforge_remove", self.handle)  # noqa: SLF001

    def set_rules(self, generation: int, limits: Mapping[int, NumberLimits] | None = None) -> list[int]:
        """Begin a new generation of outcomes, or none with -1; return the final counts of the old one.

        ``limits`` are those of arguments that are numbers, by position. Other numbers are told apart by their values.
        """
        words: list[int] = []
        for position, (integers, floats) in (limits or {}).items():
            words += [position, len(integers), *integers, len(floats)]
            words += struct.unpack(f"<{len(floats)}q", struct.pack(f"<{len(floats)}d", *floats))
        given, counts = (ctypes.c_int64 * len(words))(*words), (ctypes.c_uint64 * MAX_OUTCOMES)()
        size = self.library._call("opforge_set_rules", self.handle, generation, given, len(words), counts)  # noqa: SLF001
        return counts[:size]

    def add_outcome(self, generation: int, action: int, kernel: str = "", store: int = 0) -> int | None:
        """Add an outcome and return its number; None if the generation has passed, or has too many."""
        name, _, overload = kernel.partition(".")
        add = self.library._library.opforge_add_outcome  # noqa: SLF001
        number: int = add(self.handle, generation, action, name.encode(), overload.encode(), store)
        return number if number >= 0 else None

    def counts(self) -> list[int]:
        """Return how often each outcome of the present generation came about."""
        counts = (ctypes.c_uint64 * MAX_OUTCOMES)()
        return counts[: self.library._call("opforge_read_counts", self.handle, counts)]  # noqa: SLF001

    @property
    def geometries(self) -> int:
        """Return the number of geometries that are known."""
        return int(self.library._library.opforge_geometries(self.handle))  # noqa: SLF001

    @property
    def searches(self) -> int:
        """Return how many calls had to be searched for, because they were not among those found last."""
        return int(self.library._library.opforge_searches(self.handle))  # noqa: SLF001


_loaded: list[NativeLibrary | NativeError] = []


def load() -> NativeLibrary:
    """Return the library, built if need be; raise NativeError if there is none for this torch."""
    if not _loaded:
        try:
            _loaded.append(NativeLibrary(build()))
        except NativeError as error:
            _loaded.append(error)
    if isinstance(_loaded[0], NativeError):
        raise _loaded[0]
    return _loaded[0]


def self_test(path: str) -> None:
    """Check in a process of its own what a library reads from tensors, and that a slot works and is removed."""
    library = NativeLibrary(Path(path))
    base = torch.arange(48.0).reshape(6, 8)
    views = (base, base.t(), base[1:, ::2], base.to(torch.int16)[3:4], base.double().expand(2, 6, 8))
    for tensor in (*views, base.clone().requires_grad_()):
        _list, _count, head, *words = library.describe([tensor])
        flags = bool(tensor.storage_offset()) * 8 + bool(tensor.data_ptr() % 16) * 16 + tensor.requires_grad * 32
        expected = 3 | _DTYPES[tensor.dtype] << 8 | 0xFF << 24 | flags << 32 | tensor.dim() << 48
        if head != expected or words != [*tensor.shape, *tensor.stride()]:
            raise NativeError(f"{tensor.dtype} of the sizes {list(tensor.shape)} is read as {head:x} {words}")
    before = _dumps("aten::relu")
    for kind in ("decide", "answer", "run"):
        library.define(f"{kind}_self_test", "(Tensor self) -> int", lambda _self: -1, "CPU")
    slot = library.slot("aten::relu", "CPU")
    slot.install("self_test")
    result = torch.relu(base - 20)
    slot.remove()
    if not torch.equal(result, (base - 20).clamp(min=0)) or _dumps("aten::relu") != before:
        raise NativeError("a slot at aten::relu does not work, or is not removed")


def _dumps(operator: str) -> tuple[str, str]:
    return torch._C._dispatch_dump(operator), torch._C._dispatch_dump_table(operator)  # noqa: SLF001
