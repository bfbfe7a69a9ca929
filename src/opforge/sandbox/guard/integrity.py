"""Detect that a kernel replaced functions that clocks, comparisons or this harness rely on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from sys import getprofile, gettrace
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
    "sys": "_getframe settrace setprofile gettrace getprofile modules",
    "threading": "get_ident current_thread",
    "_thread": "get_ident allocate_lock start_new_thread",
    "gc": "collect get_objects callbacks",
}
_CLASSES = {
    ("torch", "Tensor"): "equal allclose isclose __eq__ __ne__ copy_ clone cpu numpy contiguous view data_ptr",
    ("torch.cuda", "Event"): "record elapsed_time synchronize wait query",
    ("torch.cuda", "Stream"): "synchronize wait_stream query",
    ("torch.cuda", "CUDAGraph"): "replay",
}
_OURS = "opforge."
_MISSING = object()


class FunctionSnapshot:
    """Snapshot of those functions, and of Python's hooks, before any kernel was loaded."""

    def __init__(self) -> None:
        self._callers = _callers()
        readings = list(_watched_attributes())
        self._originals = [
            (*place, full_name) for owner, attribute, full_name in readings for place in _places(owner, attribute)
        ]
        self._lines = {owner: (owner.__mro__, full_name) for owner, _, full_name in readings if isinstance(owner, type)}

    def replaced(self) -> list[str]:
        """Return the names of the functions that were replaced."""
        missing = _MISSING
        changed = [
            full_name
            for space, attribute, was, full_name in self._originals
            if space.get(attribute, missing) is not was
        ]
        changed += [full_name for owner, (line, full_name) in self._lines.items() if owner.__mro__ is not line]
        if _callers() != self._callers:
            changed.append(
                "what Python calls beside each function or collection (sys.setprofile, sys.settrace, gc.callbacks)"
            )
        return list(dict.fromkeys(changed))


def _callers() -> list[Any]:
    return [getprofile(), gettrace(), *gc.callbacks]


def _watched_attributes() -> Iterator[tuple[Any, str, str]]:
    """Yield owner, attribute and full name of everything watched."""
    for module_name, names in _WATCHED.items():
        if (module := sys.modules.get(module_name)) is not None:
            for name in names.split():
                yield module, name, f"{module_name}.{name}"
    for (module_name, class_name), names in _CLASSES.items():
        owner = getattr(sys.modules.get(module_name), class_name, None)
        for name in names.split() if owner is not None else ():
            yield owner, name, f"{module_name}.{class_name}.{name}"
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_OURS) and isinstance(module, ModuleType):
            yield from _own_attributes(module_name, module)


def _own_attributes(module_name: str, module: ModuleType) -> Iterator[tuple[Any, str, str]]:
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        yield module, name, f"{module_name}.{name}"
        if isinstance(value, type) and value.__module__ == module_name:
            for attribute, member in list(vars(value).items()):
                if isinstance(member, FunctionType | property | staticmethod | classmethod):
                    yield value, attribute, f"{module_name}.{name}.{attribute}"


def _places(owner: Any, attribute: str) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Yield the namespaces searched for an attribute, up to its own, with the value in each.

    The earlier ones count too: an attribute put there would hide the real one.
    """
    for level in owner.__mro__ if isinstance(owner, type) else (owner,):
        space = vars(level)
        yield space, attribute, space.get(attribute, _MISSING)
        if attribute in space:
            return
