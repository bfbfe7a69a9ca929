"""Load a kernel's function from its file into this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .isolated_import import load_file

Function = Callable[..., Any]


class LazyFunction:
    """A kernel's function that is loaded when it is first called. A file that failed to load is not executed again."""

    def __init__(self, load: Callable[[], Function]) -> None:
        self._load = load
        self._lock = threading.RLock()
        self._function: Function | None = None
        self._error: LoadError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._function or self._loaded())(*args, **kwargs)

    def _loaded(self) -> Function:
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                self._function = self._function or self._load()
            except LoadError as error:
                self._error = error
                raise
            return self._function


class LoadError(Exception):
    """A kernel's file cannot be loaded; the message says why."""


def load_function(file: Path, entries: Sequence[str], library: str = "") -> Function:
    """Return the first named function of a Python file, or the operator of the built library."""
    return _operator(Path(library), entries) if library else _function(file, entries)


def _function(file: Path, entries: Sequence[str]) -> Function:
    if file.suffix != ".py":
        raise LoadError(f"{file} is not a Python file")
    try:
        module = load_file(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file may call sys.exit(), which must not end the program
        raise LoadError(f"{file.name} raised while loading: {type(error).__name__}: {error}") from error
    for entry in entries:
        if callable(candidate := getattr(module, entry, None)):
            function: Function = candidate
            return function
    raise LoadError(f"{file.name} does not define {' or '.join(entries)}")


def _operator(library: Path, entries: Sequence[str]) -> Function:
    operators = _LIBRARIES.get(library)
    if operators is None:
        if _is_claimed(library.stem):  # the value of OPFORGE_NAMESPACE in its sources
            raise LoadError(
                f"{library.name} has operators in the namespace {library.stem}, which another library in this "
                "process has already, perhaps an earlier build of the same source; loading both would end the process. "
                "Start a new process, or rename one"
            )
        before = registered_operators()
        try:
            torch.ops.load_library(str(library))
        except (OSError, RuntimeError) as error:
            raise LoadError(f"{library.name} cannot be loaded: {error}") from error
        operators = sorted({name.partition(".")[0] for name in registered_operators() - before})
        _LIBRARIES[library] = operators
    function = kernel_operator(operators, names := operator_names(entries))
    if function is None:
        raise LoadError(f"{library.name} registers no operator {' or '.join(names)}")
    return function


def registered_operators() -> set[str]:
    """Return the names of all operators in this process, such as ``aten::add.out``."""
    return set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001  # torch has no public list of operators


def aten_operators() -> list[str]:
    """Return the full names of ATen's operators in this process, such as ``relu.default``."""
    names = (name.removeprefix("aten::") for name in sorted(registered_operators()) if name.startswith("aten::"))
    return [name if "." in name else f"{name}.default" for name in names]


def operator_names(entries: Sequence[str]) -> list[str]:
    """Return the names that the operator of a kernel's library may have, the preferred one first."""
    return [*entries, *(entry.removesuffix("_kernel_impl") for entry in entries)]


def kernel_operator(packets: Sequence[str], names: Sequence[str]) -> Function | None:
    """Return the operator that is the kernel: the first by these names, or else the only one."""
    matches = [packet for name in names for packet in packets if packet.partition("::")[2] == name]
    if not matches and len(packets) != 1:
        return None
    namespace, _, name = (matches or packets)[0].partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    function: Function = getattr(packet, packet.overloads()[0]) if len(packet.overloads()) == 1 else packet
    return function


def _is_claimed(namespace: str) -> bool:
    """Whether a library in this process has claimed a namespace.

    It tries to claim the namespace for a moment, which torch then refuses.
    """
    try:
        torch.library.Library(namespace, "DEF")._destroy()  # noqa: SLF001  # torch has no public way to release it
    except RuntimeError as error:
        return "Only a single TORCH_LIBRARY" in str(error)
    return False


_LIBRARIES: dict[Path, list[str]] = {}
"""Operators of the libraries loaded so far. A process loads a library only once."""
