"""Implementations of operators that are not in ATen, all of them: ``{op}/{op}_{name}.py`` is the kernel ``{op}__{name}``."""

from __future__ import annotations

from collections.abc import Iterable

from opforge.backends.base import BackendOptions
from opforge.kernels import Kernel
from opforge.kernels.custom import find


class CustomOpsBackend:
    """Every implementation {op}/{op}_NAME.py of your own operators under --custom-ops-root, side by side."""

    name = "custom_ops"

    def __init__(self, options: BackendOptions) -> None:
        self._root = options.custom_ops_root
        self.strangers: list[str] = []
        """Folders that hold no operator, in words."""
        self.remarks: list[str] = []
        """What is to be known of the operators' references."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        found = find(self._root)
        self.strangers = list(found.strangers)
        kernels: list[Kernel] = []
        self.remarks = []
        for op in ops:
            folder = found.folders.get(op)
            if folder is None:
                continue
            kernels += folder.kernels
            folder.reference  # noqa: B018  # it is looked for, and what there is to say of it is said
            self.remarks += folder.warnings
            if not folder.kernels:
                self.remarks.append(f"{op} has no implementation {op}_NAME.py: there is nothing to judge")
        return kernels
