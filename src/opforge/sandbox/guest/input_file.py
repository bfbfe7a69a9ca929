"""A user's ``gen_input.py`` in a worker: its tests, and the inputs they make, as data."""

from __future__ import annotations

import importlib
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opforge.cases import Phase, Test
from opforge.cases.tensors import flat_storage
from opforge.cases.wire import SHORT_DTYPES
from opforge.sandbox.guest.loader import KernelLoadError, describe_exception, import_file
from opforge.sandbox.host.reply import MAX_TESTS

TEST_FUNCTIONS = {Phase.CORRECTNESS: "get_correctness_tests", Phase.PERFORMANCE: "get_performance_tests"}
_ALIGN = 64


class InputFileRunner:
    """Runs a user's file; whatever the file raises becomes an error message about it."""

    def __init__(self, device: torch.device) -> None:
        self._file: InputFile | None = None
        self._device = device

    def load_tests(self, file: str) -> dict[str, Any]:
        """Load a file and return how many tests it has."""
        if self._device.type != "cpu":
            torch.set_default_device(self._device)  # tensors without a device go where kernels are judged
        try:
            self._file = InputFile(Path(file))
            return self._file.count_tests()
        except KernelLoadError as error:
            return {"error": str(error)}

    def make_inputs(self, request: dict[str, Any], arena: Any, offset: int) -> dict[str, Any]:
        """Make the inputs of one test and copy them into the arena."""
        if self._file is None:
            raise RuntimeError("no file that makes inputs is loaded")
        try:
            return self._file.make_inputs(request["phase"], request["test"], arena, offset)
        except BaseException as error:  # noqa: BLE001  # a user's file may raise anything; it is reported
            return {"error": describe_exception(error, self._file.path)}


class InputFile:
    """A loaded file; call ``count_tests`` first, then ``make_inputs`` for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tests: dict[str, list[Test]] = {}
        _provide_backendbench_import()
        _seed(0)
        self._module = import_file(path)

    def count_tests(self) -> dict[str, Any]:
        """Return the number of tests for each phase, or the reason why there are none."""
        counts: dict[str, int] = {}
        errors: dict[str, str] = {}
        for phase, name in TEST_FUNCTIONS.items():
            try:
                self._tests[phase] = self._listed(name)
                counts[phase] = len(self._tests[phase])
            except KernelLoadError as error:
                errors[phase] = str(error)
        return {"counts": counts, "errors": errors}

    def _listed(self, name: str) -> list[Test]:
        function = getattr(self._module, name, None)
        if function is None:
            raise KernelLoadError(f"{self.path.name} does not define {name}()")
        if not callable(function):
            raise KernelLoadError(f"{name} in {self.path.name} is {type(function).__name__}, not a function")
        _seed(0)
        try:
            tests = function()
        except BaseException as error:  # noqa: BLE001  # a user's file may raise anything; it is reported
            raise KernelLoadError(f"{name}() raised {describe_exception(error, self.path)}") from None
        if not isinstance(tests, list | tuple):
            raise KernelLoadError(f"{name}() returned {type(tests).__name__}, expected a list of Test(...)")
        if strange := [type(t).__name__ for t in tests if not isinstance(t, Test)]:
            raise KernelLoadError(f"{name}() returned a list with {strange[0]} in it, expected Test(...)")
        if len(tests) > MAX_TESTS:
            raise KernelLoadError(f"{name}() returned {len(tests)} tests; {MAX_TESTS} are allowed")
        return list(tests)

    def make_inputs(self, phase: str, index: int, arena: Any, offset: int) -> dict[str, Any]:
        """Return the arguments of a test as a JSON tree; copy its tensors into the arena."""
        _seed(index)
        test = self._tests[phase][index]
        place = _ArenaWriter(arena, offset)
        return {
            "args": [_described(value, f"argument {i}", place.row) for i, value in enumerate(test.args)],
            "kwargs": {name: _described(v, f"argument {name!r}", place.row) for name, v in test.kwargs.items()},
        }


class _ArenaWriter:
    """Copies the memory of tensors into the arena, one after another."""

    def __init__(self, arena: Any, arena_offset: int) -> None:
        self._arena = arena
        self._next = arena_offset

    def row(self, tensor: torch.Tensor, label: str) -> list[Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{label} is a {type(tensor).__name__}; a case holds plain tensors")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in SHORT_DTYPES:
            raise TypeError(
                f"{label} is a tensor of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device}"
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        flat = flat_storage(tensor)
        size = tensor.element_size()
        nbytes = flat.numel() - flat.numel() % size if tensor.numel() else 0
        arena_offset = self._next
        if arena_offset + nbytes > len(self._arena):
            raise MemoryError(f"{label} takes {nbytes} bytes, more than the arena has left")
        if nbytes:
            torch.frombuffer(self._arena, dtype=torch.uint8, count=nbytes, offset=arena_offset).copy_(flat[:nbytes])
        self._next = arena_offset + nbytes + (-nbytes % _ALIGN)
        offset = tensor.storage_offset() if tensor.numel() else 0
        geometry = [list(tensor.shape), list(tensor.stride()), offset]
        return [arena_offset, nbytes, SHORT_DTYPES[tensor.dtype], *geometry, str(tensor.device)]


def _described(value: Any, label: str, row: Callable[[torch.Tensor, str], list[Any]]) -> Any:
    match value:
        case torch.Tensor():
            return {"T": row(value, label)}
        case list() | tuple():
            return [_described(v, f"{label}[{i}]", row) for i, v in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
        case complex():
            return {"complex": [value.real, value.imag]}
        case torch.dtype() if value in SHORT_DTYPES:
            return {"dtype": SHORT_DTYPES[value]}
        case torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
    raise TypeError(
        f"{label} is a {type(value).__name__}; a case holds tensors, numbers, strings, dtypes and lists of those"
    )


def _seed(number: int) -> None:
    """Seed all generators: the same random inputs in every run, others in every test."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  # the generator that users' files draw from


def _provide_backendbench_import() -> None:
    """Make ``from BackendBench.suite.base import Test`` work where only opforge can be imported or read."""
    try:
        importlib.import_module("BackendBench.suite.base")
    except (ImportError, OSError):  # a checkout on PYTHONPATH that is also the current folder may not be read
        for name in ("BackendBench", "BackendBench.suite", "BackendBench.suite.base"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["BackendBench.suite.base"].Test = Test  # type: ignore[attr-defined]
