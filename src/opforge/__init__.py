"""opforge: write a PyTorch operator kernel, prove it, race it, ship it."""

from opforge.cases import Test

__version__ = "0.1.0"
__all__ = ["Test", "__version__"]
