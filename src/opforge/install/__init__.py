"""Install kernels in place of ATen's in this process, count calls, fall back to ATen, remove."""

from opforge.install.enabling import disable, enable, enabled
from opforge.install.installation import CallCounts, Installation, Observer, RefusedError

__all__ = ["CallCounts", "Installation", "Observer", "RefusedError", "disable", "enable", "enabled"]
