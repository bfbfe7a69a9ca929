"""What a CPU is called."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from opforge.runtime.devices import cpu_name

X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: A CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: A CPU @ 2 GHz\n"
ARM = "processor\t: {}\nBogoMIPS\t: 50.00\nCPU implementer\t: {}\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: {}\nCPU revision\t: 1\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (X86, "A CPU @ 2 GHz"),
        (ARM.format(0, "0x41", "0xd0c") + ARM.format(1, "0x41", "0xd0c"), "Neoverse-N1 (aarch64 0x41 0xd0c)"),
        (ARM.format(0, "0x41", "0xd40"), "Neoverse-V1 (aarch64 0x41 0xd40)"),
        (ARM.format(0, "0x61", "0x022") + ARM.format(1, "0x41", "0xd03"), "aarch64 0x41 0xd03, 0x61 0x022"),
        ("processor\t: 0\n", "aarch64"),
    ],
)
def test_a_cpu_has_the_name_or_the_numbers_that_its_maker_gave_it(monkeypatch, cpuinfo, name):
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        patch.setattr(platform, "processor", lambda: "")
        patch.setattr(Path, "read_text", lambda _path: cpuinfo)
        assert cpu_name() == name
