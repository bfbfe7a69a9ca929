"""What a device is called by its maker. A CPU is named without torch."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def device_name(device: str) -> str:
    """Return the name that a device's maker gave it."""
    if device.partition(":")[0] != "cuda":
        return cpu_name()
    import torch  # the process that names a CPU may have none

    return str(torch.cuda.get_device_name(device))


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
