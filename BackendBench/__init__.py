"""The names of Meta's BackendBench, each a thin layer on opforge."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if find_spec("opforge") is None:  # a plain checkout works as it stands, installed or not
    sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

if TYPE_CHECKING:
    from BackendBench.enabling import BackendBench, disable, enable, enabled

__version__ = "0.1.0"
__all__ = ["BackendBench", "disable", "enable", "enabled"]


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use; the command line goes without it."""
    if name in __all__:
        from BackendBench import enabling

        return getattr(enabling, name)
    raise AttributeError(f"module 'BackendBench' has no attribute {name!r}")
