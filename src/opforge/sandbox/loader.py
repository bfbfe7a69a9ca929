"""Load a kernel's file inside a worker, and find its entry point."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opforge.ops import Operator, table
from opforge.sandbox.adapters import adapt
from opforge.sandbox.mutants import Mutated

Function = Callable[..., Any]


class KernelLoadError(Exception):
    """The kernel cannot be loaded; the message is the reason of its verdicts."""


def aten_function(op: str) -> Function:
    """Return PyTorch's own implementation of an overload."""
    base, _, overload = op.partition(".")
    function: Function = getattr(getattr(torch.ops.aten, base), overload)
    return function


class LoadedKernel:
    """A kernel in this process: gives a callable for each operator that it serves."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._primary = table().get(description["primary"])
        file = description["file"]
        self._function = None if file is None else _entry(Path(file), description["entries"])
        self._mutant: str = description.get("mutant", "")
        self._mutated: dict[str, Mutated] = {}

    def callable_for(self, op: str) -> Function:
        if self._mutant:
            return self._mutated_for(op)
        if self._function is None:
            return aten_function(op)
        wanted = table().get(op)
        if wanted is None or self._primary is None:
            return self._function
        return adapt(self._function, wanted, implements=self._primary)

    def _mutated_for(self, op: str) -> Mutated:
        """Return the mutant of an operator, one and the same for all batches: it remembers what it has shown."""
        if op not in self._mutated:
            facts = table().get(op)
            if facts is None:
                raise NotImplementedError(f"{op} has no schema to make a mutant by")
            self._mutated[op] = Mutated(facts, aten_function(op), self._mutant)
        return self._mutated[op]


def operator(op: str) -> Operator | None:
    return table().get(op)


def _entry(path: Path, names: list[str]) -> Function:
    module = _import(path)
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            if not callable(found):
                raise KernelLoadError(f"{name} in {path.name} is {type(found).__name__}, not a function")
            function: Function = found
            return function
    have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:8]
    raise KernelLoadError(
        f"{path.name} does not define {' or '.join(names)}; it defines {', '.join(have) or 'nothing callable'}"
    )


def _import(path: Path) -> Any:
    try:
        path.read_bytes()
    except OSError as error:
        raise KernelLoadError(f"{path} cannot be read: {error.strerror}") from None
    spec = importlib.util.spec_from_file_location("opforge_kernel", path)
    if spec is None or spec.loader is None:
        raise KernelLoadError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise KernelLoadError(f"{path.name}, line {error.lineno}: SyntaxError: {error.msg}") from None
    except BaseException as error:  # noqa: BLE001  # the border: whatever a kernel's file raises is its verdict
        raise KernelLoadError(f"{path.name} raised while loading: {describe_exception(error, path)}") from None
    return module


def describe_exception(error: BaseException, path: Path | None = None) -> str:
    """Say what was raised and where in the kernel's file; never raises, whatever the exception's own methods do."""
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001  # an exception of the kernel's own making
        message = "(no message)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if path is not None and f.filename == str(path)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[:1000]}{where}"
