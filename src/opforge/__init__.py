"""opforge: write a PyTorch operator kernel, prove it, race it, ship it."""

from typing import TYPE_CHECKING, Any

from opforge.cases import Test

if TYPE_CHECKING:
    from opforge.client import AsyncClient, Client
    from opforge.install import disable, enable, enabled

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Test", "__version__", "disable", "enable", "enabled"]


def __getattr__(name: str) -> Any:
    """Import names that need torch or httpx on first use; the command line's help works without them."""
    if name in ("enable", "enabled", "disable"):
        from opforge import install

        return getattr(install, name)
    if name in ("AsyncClient", "Client"):
        from opforge import client

        return getattr(client, name)
    raise AttributeError(f"module 'opforge' has no attribute {name!r}")
