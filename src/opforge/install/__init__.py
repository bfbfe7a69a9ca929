"""Kernels in ATen's place in this process: put in, counted, with ATen's own to fall back on, and taken out again."""

from opforge.install.enabling import disable, enable, enabled
from opforge.install.installation import Count, Installation, Observer, RefusedError

__all__ = ["Count", "Installation", "Observer", "RefusedError", "disable", "enable", "enabled"]
