"""The interface of a backend and its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opforge.kernels import Kernel


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options that apply to any backend."""

    ops_directory: Path = Path("generated_kernels")
    implementations: Mapping[str, str] | None = None
    """Implementation to use for a folder instead of the newest, by folder name."""
    custom_ops_root: Path = Path("custom_ops")
    generation: Mapping[str, Any] | None = None
    """Options for backends that generate kernels."""


class Backend(Protocol):
    """A source of kernels."""

    name: str

    def __init__(self, options: BackendOptions) -> None: ...

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        """Return the kernels for a suite's operators; kernels for one operator are compared."""
        ...
