"""What a backend is to the rest of the house."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opforge.kernels import Kernel


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a user may ask of any backend."""

    ops_directory: Path = Path("generated_kernels")
    implementations: Mapping[str, str] | None = None
    """Which implementation to take for a folder, where it is not the newest."""
    custom_ops_root: Path = Path("custom_ops")
    generation: Mapping[str, Any] | None = None
    """How kernels are made, for a backend that makes them."""


class Backend(Protocol):
    """A source of kernels."""

    name: str

    def __init__(self, options: BackendOptions) -> None: ...

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        """Return the kernels for the operators of a suite; several for one operator are compared with each other."""
        ...
