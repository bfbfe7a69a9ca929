"""Notice that a kernel has replaced functions which clocks, comparisons and this harness are made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

_WATCHED = {
    "time": "perf_counter perf_counter_ns time time_ns monotonic monotonic_ns process_time process_time_ns sleep",
    "os": "fork _exit kill read write pipe dup2 getpid",
    "json": "dumps loads",
    "builtins": "isinstance len getattr setattr type print open sum min max abs sorted zip range id hash exec eval",
    "torch": "allclose equal isclose frombuffer is_tensor empty tensor",
    "torch.testing": "assert_close",
    "torch.utils.benchmark": "Timer",
    "torch.cuda": "synchronize Event Stream CUDAGraph graph current_stream stream",
    "torch.library": "Library get_kernel",
    "numpy": "allclose array_equal isclose",
    "numpy.testing": "assert_allclose assert_array_equal",
    "triton.testing": "do_bench do_bench_cudagraph",
    "mmap": "mmap",
    "struct": "Struct",
}
_CLASSES = {
    ("torch", "Tensor"): "equal allclose isclose __eq__ __ne__ copy_ clone cpu numpy contiguous view data_ptr",
    ("torch.cuda", "Event"): "record elapsed_time synchronize wait query",
    ("torch.cuda", "Stream"): "synchronize wait_stream query",
    ("torch.cuda", "CUDAGraph"): "replay",
}
_OURS = "opforge."
_MISSING = object()


class Seals:
    """What those functions were before any kernel was loaded."""

    def __init__(self) -> None:
        self._held = list(_readings())

    def broken(self) -> list[str]:
        """Return the names of the functions that are others now."""
        return [what for owner, attribute, was, what in self._held if _own(owner, attribute) is not was]


def _readings() -> Iterator[tuple[Any, str, Any, str]]:
    for module_name, names in _WATCHED.items():
        if (module := sys.modules.get(module_name)) is not None:
            for name in names.split():
                yield module, name, _own(module, name), f"{module_name}.{name}"
    for (module_name, class_name), names in _CLASSES.items():
        owner = getattr(sys.modules.get(module_name), class_name, None)
        for name in names.split() if owner is not None else ():
            yield owner, name, _own(owner, name), f"{module_name}.{class_name}.{name}"
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_OURS) and isinstance(module, ModuleType):
            yield from _of_ours(module_name, module)


def _of_ours(module_name: str, module: ModuleType) -> Iterator[tuple[Any, str, Any, str]]:
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        yield module, name, value, f"{module_name}.{name}"
        if isinstance(value, type) and value.__module__ == module_name:
            for attribute, member in list(vars(value).items()):
                if isinstance(member, FunctionType | property | staticmethod | classmethod):
                    yield value, attribute, member, f"{module_name}.{name}.{attribute}"


def _own(owner: Any, attribute: str) -> Any:
    """Return an attribute as it is stored, so that a method is the same object each time."""
    for level in owner.__mro__ if isinstance(owner, type) else (owner,):
        if attribute in vars(level):
            return vars(level)[attribute]
    return getattr(owner, attribute, _MISSING)
