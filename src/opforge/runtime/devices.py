"""Product names of devices. Naming a CPU needs no torch."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def device_name(device: str) -> str:
    """Return a device's product name."""
    if device.partition(":")[0] != "cuda":
        return cpu_name()
    import torch  # not at the top: a process that names a CPU may lack torch

    return str(torch.cuda.get_device_name(device))


def architecture(device: str) -> str:
    """Return the architecture of a device: compiled kernels are for one exactly."""
    if device.partition(":")[0] != "cuda":
        return platform.machine()
    import torch  # not at the top, as above

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    try:
        return _parse_cpu_name(Path("/proc/cpuinfo").read_text()) or platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _parse_cpu_name(cpuinfo: str) -> str:
    """Return the CPU's name from the text of /proc/cpuinfo.

    ARM CPUs list numbers of implementer and part instead. One machine may have several kinds.
    """
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return match[1].strip()
    numbers = r"^CPU implementer\s*:\s*(0x\w+)$(?:\n.+)*?\nCPU part\s*:\s*(0x\w+)$"
    kinds = sorted({f"{maker} {part}" for maker, part in re.findall(numbers, cpuinfo, re.MULTILINE)})
    return f"{platform.machine()} {', '.join(kinds)}" if kinds else ""
