"""Where kernels come from."""

from opforge.backends.base import Backend, BackendOptions

__all__ = ["Backend", "BackendOptions"]
