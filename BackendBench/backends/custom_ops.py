"""Implementations of operators that are not ATen's."""

from pathlib import Path

from BackendBench.opregistry import CustomOperator
from BackendBench.sources import KernelFunction
from opforge.kernels.custom_folder import find_custom_ops

from .base import Backend


class CustomOpsBackend(Backend):
    """Each implementation ``{op}/{op}_NAME.py``, under the key ``{op}__NAME``."""

    def __init__(self, custom_ops_root: str | Path = "custom_ops") -> None:
        super().__init__("custom_ops")
        for folder in find_custom_ops(Path(custom_ops_root)).folders.values():
            for kernel in folder.kernels:
                self.compiled_kernels[CustomOperator(kernel.name, folder.op)] = KernelFunction(kernel, folder.op)
