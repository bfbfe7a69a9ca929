"""Kernels as Python values: what backends return for an operator, and what ``eval`` is given."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from BackendBench.opregistry import OpOverload, name_of
from opforge.backends.single import SingleBackend
from opforge.errors import OpforgeError
from opforge.kernels import Kernel, ServedOperator
from opforge.kernels.source import digest
from opforge.ops import table
from opforge.sandbox.guest.loader import LoadedKernel


@dataclass(eq=False)
class KernelFunction:
    """A kernel of a backend, as a function for one operator. Judging it does not load it here; calling it does."""

    kernel: Kernel
    op: str
    _loaded: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loaded is None:
            self._loaded = LoadedKernel(self.kernel.wire()).callable_for(self.op)
        return self._loaded(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.kernel.name


def kernel_of(impl: Any, op: str, folder: Path) -> Kernel:
    """Return the kernel to judge; a function's source is copied to ``folder``."""
    if isinstance(impl, KernelFunction):
        if impl.kernel.reference is not None:
            return impl.kernel
        return replace(impl.kernel, serves=(ServedOperator(op),))
    if isinstance(impl, OpOverload) or getattr(torch, getattr(impl, "__name__", ""), None) is impl:
        if name_of(impl) != op:
            raise OpforgeError(
                f"{impl} is ATen's own {name_of(impl)}, and no kernel for {op}; give a function that calls it"
            )
        return SingleBackend.from_argument(f"aten:{op}").kernel
    if not isinstance(impl, FunctionType):
        raise OpforgeError(
            f"{impl!r} cannot be judged: it is neither an ATen operator, nor a backend's kernel, nor a Python function"
        )
    file = folder / f"{table().resolve(op).base}_implementation_1.py"
    file.write_text(_source(impl), encoding="utf-8")
    return Kernel(impl.__name__, op, (ServedOperator(op),), str(file), (impl.__name__,), digest(file))


def _source(function: FunctionType) -> str:
    """Return a module with the function, and what it uses of its own module."""
    module = inspect.getmodule(function)
    problem = _why_not_alone(function)
    if problem or module is None:
        raise OpforgeError(
            f"{function.__qualname__} cannot be judged: {problem or 'its source is in no file'}. Write it as a function "
            "of a module, or as a kernel file in a directory"
        )
    text = textwrap.dedent(inspect.getsource(function))
    statements = ast.parse(inspect.getsource(module)).body
    used, needed = _names(ast.parse(text)), set[int]()
    while found := {n for n, s in enumerate(statements) if n not in needed and used & _bound(s)} - needed:
        needed |= found
        used = used.union(*(_names(statements[n]) for n in found))
    kept = [ast.unparse(statements[n]) for n in sorted(needed) if function.__name__ not in _bound(statements[n])]
    return "\n".join(["from __future__ import annotations", *kept, text])


def _names(tree: ast.AST) -> set[str]:
    """Return the names in a piece of source."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names} - {"annotations"}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign() | ast.AnnAssign():
            return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        case ast.If() | ast.Try():
            return set[str]().union(
                *(
                    _bound(inner)
                    for inner in ast.walk(statement)
                    if inner is not statement and isinstance(inner, ast.stmt)
                )
            )
    return set()


def _why_not_alone(function: FunctionType) -> str:
    if function.__name__ == "<lambda>":
        return "it is a lambda"
    if function.__code__.co_freevars:
        return f"it uses {', '.join(function.__code__.co_freevars)} of the function around it"
    try:
        inspect.getsource(function)
    except (OSError, TypeError):
        return "its source is in no file"
    return ""
