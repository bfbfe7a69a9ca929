"""Landlock: restrict this process and all that it starts to named files. Linux 5.13 and newer."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(13, 16))

READ = READ_FILE | READ_DIR | EXECUTE
LIST = READ_DIR
DEVICE = READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV | TRUNCATE
THREAD_FOLDER = READ | WRITE_FILE | TRUNCATE
OWN_FOLDER = (
    READ | WRITE_FILE | TRUNCATE | REFER | REMOVE_DIR | REMOVE_FILE
    | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
)  # fmt: skip
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

_MIN_VERSION = 2
"""Version 1 forbids moving files between folders, even one's own, and Triton's cache does that."""
TCP_MIN_VERSION, DEVICES_MIN_VERSION, SCOPES_MIN_VERSION, TRUNCATE_MIN_VERSION = 4, 5, 6, 3


def version() -> int:
    """Return the version of Landlock; 0 if there is none or it is too old."""
    reported = int(_LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))
    return reported if reported >= _MIN_VERSION else 0


@dataclass(frozen=True, slots=True)
class OpenedRules:
    """Rules with open files, so that many processes can apply them quickly."""

    rules: tuple[bytes, ...]
    handles: frozenset[int]


def open_rules(allowed: Mapping[str, int], abi_version: int) -> OpenedRules:
    """Open the allowed paths. Missing paths are skipped."""
    handles_and_rules = [
        opened for path, rights in allowed.items() if (opened := _open(path, rights & _handled(abi_version)))
    ]
    return OpenedRules(
        tuple(rule for _, rule in handles_and_rules), frozenset(handle for handle, _ in handles_and_rules)
    )


def restrict(shared: OpenedRules, own: Mapping[str, int], abi_version: int) -> None:
    """Forbid all that this version can forbid, except by the rules; then close their files."""
    opened_own = open_rules(own, abi_version)
    ruleset = _call(_CREATE, *_attributes(_handled(abi_version), abi_version), 0)
    try:
        for rule in (*shared.rules, *opened_own.rules):
            _call(_ADD, ruleset, _PATH_BENEATH, rule, 0)
        _call(_RESTRICT, ruleset, 0)
    finally:
        for handle in (ruleset, *shared.handles, *opened_own.handles):
            os.close(handle)


def _handled(known: int) -> int:
    bits = 13 + (known >= 2) + (known >= TRUNCATE_MIN_VERSION) + (known >= DEVICES_MIN_VERSION)
    return (1 << bits) - 1


def _attributes(handled: int, known: int) -> tuple[ctypes.Array[ctypes.c_char], ctypes.c_size_t]:
    fields: Iterable[int] = [handled]
    if known >= TCP_MIN_VERSION:
        fields = [handled, 0b11]  # TCP bind and connect, with no port allowed
    if known >= SCOPES_MIN_VERSION:
        fields = [handled, 0b11, 0b11]  # abstract sockets and signals, within this process's domain only
    packed = struct.pack(f"={len(list(fields))}Q", *fields)
    return ctypes.create_string_buffer(packed, len(packed)), ctypes.c_size_t(len(packed))


def _open(path: str, rights: int) -> tuple[int, bytes] | None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None  # missing: nothing to allow
    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        rights &= _FILE_RIGHTS
    return handle, struct.pack("=Qi", rights, handle)


def _call(number: int, *args: object) -> int:
    result = int(_LIBC.syscall(number, *args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock refused (system call {number}): {os.strerror(code)}")
    return result
