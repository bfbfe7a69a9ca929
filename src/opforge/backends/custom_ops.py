"""Implementations of non-ATen operators: ``{op}/{op}_{name}.py`` is kernel ``{op}__{name}``."""

from __future__ import annotations

from collections.abc import Iterable

from opforge.backends.base import BackendOptions
from opforge.kernels import Kernel
from opforge.kernels.custom_folder import find_custom_ops


class CustomOpsBackend:
    """Every implementation {op}/{op}_NAME.py of your own operators under --custom-ops-root, side by side."""

    name = "custom_ops"

    def __init__(self, options: BackendOptions) -> None:
        self._root = options.custom_ops_root
        self.skipped: list[str] = []
        """Messages about folders without an operator."""
        self.remarks: list[str] = []
        """Messages about references and about operators without an implementation."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        custom_ops = find_custom_ops(self._root)
        self.skipped = list(custom_ops.skipped)
        kernels: list[Kernel] = []
        self.remarks = []
        for op in ops:
            folder = custom_ops.folders.get(op)
            if folder is None:
                continue
            kernels += folder.kernels
            folder.reference  # noqa: B018  # finding the reference fills folder.warnings
            self.remarks += folder.warnings
            if not folder.kernels:
                self.remarks.append(f"{op} has no implementation {op}_NAME.py: there is nothing to judge")
        return kernels
