"""Load a kernel's file inside a worker, and find its entry point."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import _engine_run_backward

from opforge.imports import run_file
from opforge.kernels.native.inspect import explain_load_error
from opforge.kernels.source import UNREADABLE, digest
from opforge.ops import Operator, table
from opforge.runtime.adapters import adapt
from opforge.runtime.aten_kernels import override
from opforge.runtime.isolated_import import load_file
from opforge.runtime.loading import kernel_operator, operator_names, registered_operators
from opforge.runtime.trees import map_instances
from opforge.sandbox.mutants.mutant import Mutant

Function = Callable[..., Any]


class KernelLoadError(Exception):
    """The kernel cannot be loaded; the message becomes the reason of its verdicts."""


def aten_function(op: str) -> Function:
    """Return PyTorch's own implementation of an overload."""
    base, _, overload = op.partition(".")
    function: Function = getattr(getattr(torch.ops.aten, base), overload)
    return function


def gradients(function: Function, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Call a function with autograd on; return the gradient of each floating-point input, or None.

    The gradients of the results are the same in every process: a cosine along the elements.
    """
    wanted = [t for t in inputs if t.is_floating_point() or t.is_complex()]
    for tensor in wanted:
        tensor.requires_grad_()
    with torch.enable_grad():
        result = function(*args, **kwargs)
        results = result if isinstance(result, list | tuple) else [result]
        outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            raise NotImplementedError("no result requires a gradient")
        return [_with_memory(t) for t in backward(outputs, [_output_gradient(t) for t in outputs], wanted)]


def backward(outputs: list[Any], output_gradients: list[Any], inputs: list[Any]) -> tuple[torch.Tensor | None, ...]:
    """Return gradients like ``torch.autograd.grad``, with None for an input that no output uses.

    ``torch.autograd.grad`` imports sympy to compare two shapes. That takes half a second in each
    worker and slows all its later calls a little, so they would be slower than those of ATen's
    worker in a race.
    """
    retain_graph, create_graph, allow_unused = False, False, True
    engine_arguments = (
        tuple(outputs),
        tuple(output_gradients),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unused,
    )
    # On a GPU the backward pass runs in its own threads. ATen's calls there could not be told from
    # calls by a kernel's threads.
    with torch.autograd.set_multithreading_enabled(False):
        grads: tuple[torch.Tensor | None, ...] = _engine_run_backward(*engine_arguments, accumulate_grad=False)
    return grads


def _with_memory(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient with memory: torch represents some zeros without any."""
    if gradient is None or not torch._is_zerotensor(gradient):  # noqa: SLF001  # torch has no public test for it
        return gradient
    return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _output_gradient(result: torch.Tensor) -> torch.Tensor:
    # by NumPy: torch's own cosine may be under test
    wave = np.cos(np.arange(result.numel(), dtype=np.float64)).reshape(result.shape)
    return torch.from_numpy(wave).to(device=result.device, dtype=result.dtype)


@contextmanager
def override_aten(function: Function, op: str, key: str) -> Iterator[None]:
    """Install a function as ATen's kernel for a device; its tensors require no gradients."""
    facts = table().get(op)
    if facts is None:
        raise NotImplementedError(f"{op} is not an operator of ATen's")
    library = torch.library.Library("aten", "IMPL")
    override(library, facts, without_gradients(function), key)
    try:
        yield
    finally:
        library._destroy()  # noqa: SLF001  # torch has no public way to remove an implementation


def without_gradients(function: Function) -> Function:
    """Wrap a function so that its tensors require no gradients, as for a kernel below autograd."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            args, kwargs = map_instances((args, kwargs), torch.Tensor, torch.Tensor.detach)
            return function(*args, **kwargs)

    return call


class LoadedKernel:
    """A kernel in this process; returns a callable for each operator that it implements."""

    def __init__(
        self, description: dict[str, Any], wrap: Callable[[Function], Function] = lambda function: function
    ) -> None:
        self._primary = table().get(description["primary"])
        self.operator: Any = None
        """The operator that a C++ kernel is."""
        self.function: Function | None = None
        """The kernel's function as calls run it; None for ATen itself."""
        if description["file"] is not None:
            function = _function(description)
            self.operator = function if isinstance(function, torch._ops.OpOverload) else None  # noqa: SLF001
            self.function = wrap(function)
        if description.get("identity"):
            self.function = _identity
        self._mutant: str = description.get("mutant", "")
        self._mutated: dict[str, Mutant] = {}

    def callable_for(self, op: str) -> Function:
        if self._mutant:
            return self._mutated_for(op)
        if self.function is None:
            return aten_function(op)
        wanted = table().get(op)
        if wanted is None or self._primary is None:
            return self.function
        return adapt(self.function, wanted, implements=self._primary)

    def _mutated_for(self, op: str) -> Mutant:
        """Return an operator's mutant, shared by all batches: it remembers what it has shown."""
        if op not in self._mutated:
            facts = table().get(op)
            if facts is None:
                raise NotImplementedError(f"{op} has no schema to make a mutant by")
            self._mutated[op] = Mutant(facts, aten_function(op), self._mutant)
        return self._mutated[op]


def _identity(given: Any = None, *_others: Any, **_named: Any) -> Any:
    """Return the first argument. Stands in for a missing reference."""
    return given


def find_operator(op: str) -> Operator | None:
    return table().get(op)


def _function(description: dict[str, Any]) -> Function:
    if broken := description.get("broken"):
        raise KernelLoadError(broken)
    if library := description.get("library"):
        return _operator_in(library, Path(description["file"]), description["entries"])
    file = Path(description["file"])
    _check_unchanged(file, description.get("digest", ""))
    function = _entry(file, description["entries"])
    _check_unchanged(file, description.get("digest", ""))
    return function


def _check_unchanged(file: Path, judged: str) -> None:
    """Reject a source that has changed since the run began."""
    if judged and digest(file) not in (judged, UNREADABLE):
        raise KernelLoadError(f"{file.name}, or a file that it uses, has changed since the run began; run it again")


def _operator_in(library: str, source: Path, names: list[str]) -> Function:
    """Load the library built from a kernel's source; return the operator that is the kernel."""
    before = registered_operators()
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        raise KernelLoadError(explain_load_error(Path(library), str(error.__cause__ or error))) from None
    added = sorted(registered_operators() - before)
    wanted = operator_names(names)
    function = kernel_operator(list(dict.fromkeys(name.partition(".")[0] for name in added)), wanted)
    if function is None:
        have = f"it registers {', '.join(added[:8])}" if added else "it registers none"
        raise KernelLoadError(
            f"{source.name} registers no operator {' or '.join(dict.fromkeys(wanted))}: {have}; "
            f'define one with TORCH_LIBRARY and m.def("{wanted[0]}(…) -> …")'
        )
    return function


def _entry(path: Path, names: list[str]) -> Function:
    module = import_kernel(path)
    for name in names:
        value = getattr(module, name, None)
        if value is not None:
            if not callable(value):
                raise KernelLoadError(f"{name} in {path.name} is {type(value).__name__}, not a function")
            function: Function = value
            return function
    have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:8]
    raise KernelLoadError(
        f"{path.name} does not define {' or '.join(names)}; it defines {', '.join(have) or 'nothing callable'}"
    )


def import_file(path: Path) -> Any:
    """Import a user's file as a module; raise KernelLoadError with the reason if that fails."""
    with _raising_load_errors(path):
        sys.path.insert(0, str(path.parent))
        return run_file(path, "opforge_kernel")


def import_kernel(path: Path) -> Any:
    """Import a kernel's file as an enabling program does; raise KernelLoadError if that fails."""
    with _raising_load_errors(path):
        return load_file(path)


@contextmanager
def _raising_load_errors(path: Path) -> Iterator[None]:
    """Turn whatever a kernel's file raises into a KernelLoadError, the reason of its verdict."""
    try:
        path.read_bytes()
    except OSError as error:
        raise KernelLoadError(f"{path} cannot be read: {error.strerror}") from None
    if path.suffix != ".py":
        raise KernelLoadError(f"{path} is not a Python file")
    try:
        yield
    except KernelLoadError:
        raise
    except SyntaxError as error:
        raise KernelLoadError(f"{path.name}, line {error.lineno}: SyntaxError: {error.msg}") from None
    except BaseException as error:  # noqa: BLE001  # the file may raise anything
        raise KernelLoadError(f"{path.name} raised while loading: {describe_exception(error, path)}") from None


def describe_exception(error: BaseException, path: Path | None = None) -> str:
    """Describe an exception and its line in the kernel's file.

    Never raises, whatever the exception's own methods do.
    """
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001  # the kernel may define its own exception class
        message = "(no message)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if path is not None and f.filename == str(path)]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[:1000]}{where}{_hint(error, path)}"


def _hint(error: BaseException, path: Path | None) -> str:
    """Explain why a kernel cannot read a file beside its own."""
    if path is None or type(error) is not PermissionError or not isinstance(error.filename, str):
        return ""
    beside = Path(error.filename).is_relative_to(path.parent)
    return "; a kernel can read only those files beside it that its source imports or names in full" if beside else ""
