"""Dynamic symbols of shared libraries, read from the files without loading them."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"\x7fELF\x02\x01"
_DYNSYM_SECTION_TYPE = 11
_UNDEFINED = 0
_SYMBOL_DTYPE = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


class NotALibraryError(ValueError):
    """The file is broken, or not a shared library of a 64-bit little-endian system."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function or variable that a library defines, or needs from another library."""

    name: str
    offset: int
    """From the library's load address; 0 if another library defines it."""
    size: int
    defined: bool


def symbols(path: Path, matching: str) -> Iterator[Symbol]:
    """Yield the symbols whose names start with a match of a pattern."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            names, table = _dynamic_symbols(data)
        except (struct.error, ValueError, StopIteration, IndexError) as error:
            raise NotALibraryError(f"{path} is not a shared library: {error}") from None
    pattern = re.compile(rb"(?<=\0)(?:" + matching.encode() + rb")[^\0]*")
    named = {match.start(): match[0].decode(errors="replace") for match in pattern.finditer(names)}
    for name, _info, _other, section, value, size in table[np.isin(table["name"], list(named))].tolist():
        yield Symbol(named[name], value, size, section != _UNDEFINED)


def _dynamic_symbols(data: mmap.mmap) -> tuple[bytes, np.ndarray]:
    """Return the names of the dynamic symbols, concatenated, and the symbol table."""
    if data[:6] != _MAGIC:
        raise ValueError("it does not begin like one")
    (sections_offset,) = struct.unpack_from("<Q", data, 0x28)
    section_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_offset + number * section_size) for number in range(count)
    ]
    dynsym = next(section for section in sections if section[1] == _DYNSYM_SECTION_TYPE)
    names = sections[dynsym[6]]
    table = np.frombuffer(data[dynsym[4] : dynsym[4] + dynsym[5]], _SYMBOL_DTYPE)
    return data[names[4] : names[4] + names[5]], table
