"""A backend: kernels by operator."""

from collections.abc import Iterable
from typing import Any

from BackendBench.opregistry import get_operator
from BackendBench.sources import KernelFunction
from opforge.kernels import Kernel


class Backend:
    """Kernels by operator, as functions that are loaded when they are first called."""

    def __init__(self, name: str, kernels: Iterable[Kernel] = ()) -> None:
        self.name = name
        self.compiled_kernels: dict[Any, KernelFunction] = {
            get_operator(kernel.primary): KernelFunction(kernel, kernel.primary) for kernel in kernels
        }

    def __contains__(self, op: Any) -> bool:
        return op in self.compiled_kernels

    def __getitem__(self, op: Any) -> Any:
        if op not in self.compiled_kernels:
            raise KeyError(f"backend {self.name} has no kernel for {op}; it has {len(self.compiled_kernels)} others")
        return self.compiled_kernels[op]
