"""Tell whose code a file or a stack frame is: opforge's, torch's, Python's import system's, or the user's."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from pathlib import Path

_OPFORGE = Path(__file__).resolve().parent
_IMPORTLIB = Path(importlib.__file__).resolve().parent


@functools.cache
def torch_folder() -> Path:
    """Return the folder of the installed torch without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    return Path(spec.origin).resolve().parent


def is_from_opforge(filename: str) -> bool:
    """Return whether a file belongs to the opforge package; a user's checkout may have any name."""
    return Path(filename).resolve().is_relative_to(_OPFORGE)


def is_from_torch(filename: str) -> bool:
    """Return whether a file belongs to the torch package, which torchao and others do not."""
    return Path(filename).resolve().is_relative_to(torch_folder())


def is_import_system(filename: str) -> bool:
    """Return whether a frame belongs to Python's import system."""
    return filename.startswith("<frozen importlib") or Path(filename).resolve().is_relative_to(_IMPORTLIB)


def is_users(filename: str) -> bool:
    """Return whether a frame comes from a file of the user's: not opforge, not torch, not generated code."""
    return not (
        filename.startswith("<") or is_from_opforge(filename) or is_from_torch(filename) or is_import_system(filename)
    )
