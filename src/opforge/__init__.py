"""opforge: write a PyTorch operator kernel, prove it, race it, ship it."""

from typing import TYPE_CHECKING, Any

from opforge.cases import Test

if TYPE_CHECKING:
    from opforge.install import disable, enable, enabled

__version__ = "0.1.0"
__all__ = ["Test", "__version__", "disable", "enable", "enabled"]


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use; the command line's help works without it."""
    if name in ("enable", "enabled", "disable"):
        from opforge import install

        return getattr(install, name)
    raise AttributeError(f"module 'opforge' has no attribute {name!r}")
