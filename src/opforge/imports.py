"""Run a Python file that is not on the search path."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def run_file(file: Path, name: str) -> ModuleType:
    """Run a file as the module ``name`` and return it. Exceptions of its code propagate."""
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{str(file)!r} is not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
