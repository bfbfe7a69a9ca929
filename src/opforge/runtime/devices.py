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
        return _named(Path("/proc/cpuinfo").read_text()) or platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _named(cpuinfo: str) -> str:
    """Return the name of a CPU as Linux tells it; ARM's have numbers of who made them and of what they are, and there may be several kinds in one machine."""
    if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return found[1].strip()
    numbers = r"^CPU implementer\s*:\s*(0x\w+)$(?:\n.+)*?\nCPU part\s*:\s*(0x\w+)$"
    kinds = sorted({f"{maker} {part}" for maker, part in re.findall(numbers, cpuinfo, re.MULTILINE)})
    return f"{platform.machine()} {', '.join(kinds)}" if kinds else ""
