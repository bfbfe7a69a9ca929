"""Read the header and the sections of an ELF file: its machine, and the bytes that it loads."""

from __future__ import annotations

import struct
from pathlib import Path

_MACHINES = {0x03: "i386", 0x28: "arm", 0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv"}
_ALLOCATED, _WITHOUT_CONTENTS = 0x2, 8
"""Flag of sections that are loaded, and type of those that take no bytes of the file."""


def machine(path: Path) -> str:
    """Return the machine that a library or program is for."""
    data = path.read_bytes()[:64]
    number = struct.unpack_from(f"{_order(data)}H", data, 18)[0]
    return _MACHINES.get(number, f"machine {number}")


def loaded_bytes(path: Path) -> int:
    """Return the bytes of code and data that are loaded, without padding, symbols and debug information."""
    data = path.read_bytes()
    order, wide = _order(data), data[4] == 2
    table = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", data, 40 if wide else 32)[0]
    size, count = struct.unpack_from(f"{order}HH", data, 58 if wide else 46)
    layout = f"{order}{'IIQQQQ' if wide else 'IIIIII'}"
    sections = [struct.unpack_from(layout, data, table + number * size) for number in range(count)]
    return sum(s[5] for s in sections if s[2] & _ALLOCATED and s[1] != _WITHOUT_CONTENTS)


def _order(data: bytes) -> str:
    if data[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    return "<" if data[5] == 1 else ">"
