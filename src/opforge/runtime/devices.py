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


_ARM_CORES = {
    "0x41 0xd03": "Cortex-A53",
    "0x41 0xd05": "Cortex-A55",
    "0x41 0xd07": "Cortex-A57",
    "0x41 0xd08": "Cortex-A72",
    "0x41 0xd0b": "Cortex-A76",
    "0x41 0xd0c": "Neoverse-N1",
    "0x41 0xd40": "Neoverse-V1",
    "0x41 0xd49": "Neoverse-N2",
    "0x41 0xd4f": "Neoverse-V2",
    "0x41 0xd84": "Neoverse-V3",
    "0x41 0xd8e": "Neoverse-N3",
    "0xc0 0xac3": "Ampere-1",
}
"""Names of ARM cores, by implementer and part."""


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    try:
        return _parse_cpu_name(Path("/proc/cpuinfo").read_text()) or platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _parse_cpu_name(cpuinfo: str) -> str:
    """Return the CPU's name from the text of /proc/cpuinfo.

    ARM CPUs list numbers of implementer and part instead, of which the usual ones have a name here. One machine may
    have several kinds.
    """
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return match[1].strip()
    numbers = r"^CPU implementer\s*:\s*(0x\w+)$(?:\n.+)*?\nCPU part\s*:\s*(0x\w+)$"
    kinds = sorted({f"{maker} {part}" for maker, part in re.findall(numbers, cpuinfo, re.MULTILINE)})
    names = [_ARM_CORES.get(kind, "") for kind in kinds]
    numbered = f"{platform.machine()} {', '.join(kinds)}" if kinds else ""
    return f"{' and '.join(names)} ({numbered})" if kinds and all(names) else numbered
