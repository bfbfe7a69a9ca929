"""Block the ways to ATen's operators that bypass its dispatcher, where traps do not see a call.

``at::cpu::mm`` and the like are functions of torch's libraries. Torch's shims for compiled models
and its static runtime call them, and a kernel can find them by name. In a kernel's process their
first instructions are replaced by an exit with a special status.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from opforge.kernels.native.elf import NotALibraryError, symbols
from opforge.ops import table

EXIT_STATUS = 113
"""Exit status of a process that calls one of them."""
_LIBRARIES = {"libtorch_cpu.so": r"_ZN2at3cpu\d|_ZN5torch3jit12StaticModuleC", "libtorch_cuda.so": r"_ZN2at4cuda\d"}
_STATIC_RUNTIME = "StaticModule"
_EXIT = {  # machine code of the system call exit_group(STATUS)
    "aarch64": b"".join(
        n.to_bytes(4, "little") for n in (0x52800000 | EXIT_STATUS << 5, 0x52800000 | 94 << 5 | 8, 0xD4000001)
    ),
    "x86_64": b"\xbf" + EXIT_STATUS.to_bytes(4, "little") + b"\xb8" + (231).to_bytes(4, "little") + b"\x0f\x05",
}
_READ, _WRITE, _EXECUTE = 1, 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def function_addresses() -> dict[str, tuple[int, ...]]:
    """Return the functions' addresses by name, such as ``mm_out``. Call once before forking."""
    addresses_by_name: dict[str, list[int]] = {}
    code = _EXIT.get(platform.machine(), b"")
    for file, pattern in _LIBRARIES.items():
        path = Path(torch.__file__).parent / "lib" / file
        with contextlib.suppress(OSError, NotALibraryError):
            defined = [s for s in symbols(path, pattern) if s.defined and s.size >= len(code)]
            base = _load_address(path, defined[0].name, defined[0].offset) if defined else 0
            for symbol in defined:
                addresses_by_name.setdefault(_function(symbol.name), []).append(base + symbol.offset)
    return {name: tuple(addresses) for name, addresses in addresses_by_name.items()}


def block(operators: Iterable[str]) -> None:
    """Make the functions of operators such as ``mm.out`` end this process. Cannot be undone."""
    code = _EXIT.get(platform.machine())
    if code is None:
        return
    names = {_STATIC_RUNTIME}
    for operator in operators:
        if (facts := table().get(operator)) is not None:
            base = facts.base.removesuffix("_")
            forms = (base, f"{base}_", f"{base}_out", f"{base}_outf")
            names.update(form + suffix for form in forms for suffix in ("", "_symint"))
    for place in sorted({place for name in names for place in function_addresses().get(name, ())}):
        _overwrite(place, code)


def _load_address(path: Path, name: str, offset: int) -> int:
    place = ctypes.cast(getattr(ctypes.CDLL(str(path)), name), ctypes.c_void_p).value
    return (place or 0) - offset


def _function(symbol: str) -> str:
    """Return the function name in a mangled symbol: ``_ZN2at3cpu2mmE…`` is ``mm``."""
    if symbol.startswith("_ZN5torch"):
        return _STATIC_RUNTIME
    rest = symbol[len("_ZN2at3cpu") :] if symbol.startswith("_ZN2at3cpu") else symbol[len("_ZN2at4cuda") :]
    length = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return rest[len(length) :][: int(length)]


def _overwrite(place: int, code: bytes) -> None:
    page = _LIBC.getpagesize()
    start = place // page * page
    size = ctypes.c_size_t((place + len(code) - start + page - 1) // page * page)
    if _LIBC.mprotect(ctypes.c_void_p(start), size, _READ | _WRITE | _EXECUTE):
        return  # the system forbids it; symbols of libraries are still checked
    ctypes.memmove(place, code, len(code))
    _LIBC.mprotect(ctypes.c_void_p(start), size, _READ | _EXECUTE)
    if (clear := _clear_cache()) is not None:
        clear(ctypes.c_void_p(place), ctypes.c_void_p(place + len(code)))


@functools.cache
def _clear_cache() -> ctypes._NamedFuncPointer | None:
    """Return the function that flushes the instruction cache; None on x86, which needs none."""
    try:
        return None if platform.machine() == "x86_64" else ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
    except (OSError, AttributeError):
        return None
