"""Backends: sources of kernels."""

from opforge.backends.base import Backend, BackendOptions

__all__ = ["Backend", "BackendOptions"]
