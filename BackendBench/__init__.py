"""The names that users of kernel benchmarks know, each a line onto opforge."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("opforge") is None:  # a plain checkout works as it stands, installed or not
    sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))


def __getattr__(name: str) -> Any:
    """``BackendBench.enable``, ``disable`` and the context manager ``enabled`` are opforge's; they load torch."""
    if name in ("enable", "disable", "enabled"):
        import opforge

        return getattr(opforge, name)
    raise AttributeError(f"module 'BackendBench' has no attribute {name!r}")
