"""Classify files and stack frames: opforge, torch, Python's import system, or the user's code."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from pathlib import Path

_OPFORGE = Path(__file__).resolve().parent
_IMPORTLIB = Path(importlib.__file__).resolve().parent
_LIBRARIES = ("torch", "functorch", "triton", "sympy", "numpy")
"""Packages beside torch whose frames say nothing about the user's code."""


@functools.cache
def torch_folder() -> Path:
    """Return the folder of the installed torch without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    return Path(spec.origin).resolve().parent


def is_from_opforge(filename: str) -> bool:
    """Return whether a file belongs to the opforge package.

    A user's checkout may have any name, so the path is compared with the package's own folder.
    """
    return Path(filename).resolve().is_relative_to(_OPFORGE)


def is_from_torch(filename: str) -> bool:
    """Return whether a file belongs to the torch package itself; torchao and others do not."""
    return Path(filename).resolve().is_relative_to(torch_folder())


def is_import_system(filename: str) -> bool:
    """Return whether a frame belongs to Python's import system."""
    return filename.startswith("<frozen importlib") or Path(filename).resolve().is_relative_to(_IMPORTLIB)


def is_user_file(filename: str) -> bool:
    """Return whether a frame is from a user's file: not opforge, torch, its dependencies or generated code."""
    if filename.startswith("<") or is_from_opforge(filename) or is_import_system(filename):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(torch_folder().parent / name) for name in _LIBRARIES)
