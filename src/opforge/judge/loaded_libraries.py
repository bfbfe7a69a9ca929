"""Inspect from outside the libraries of a kernel's process for calls past ATen's dispatcher."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from opforge.kernels.native.aten_calls import (
    ATEN_DEFINITION,
    ATEN_FUNCTION,
    find_direct_call,
    rejection_reason,
    stems_of,
)
from opforge.kernels.native.elf import NotALibraryError, symbols

_TORCH_LIBRARY = re.compile(r"libtorch_(?:cpu|cuda)\b")
_SYSTEM_FOLDERS = tuple(
    f"{folder.rstrip('/')}/"
    for folder in {
        "/usr", "/lib", "/lib64", "/opt", "/nix/store", sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(),
    }
)  # fmt: skip
_ARENA_PATH_PREFIX = "/memfd:opforge-arena"
_DELETED_SUFFIX = " (deleted)"
_MAX_READ_BYTES = 256 << 20


class LoadedLibraries:
    """The libraries of one process; each is inspected once."""

    def __init__(self, pid: int, author_paths: Iterable[str] = ()) -> None:
        self._pid = pid
        self._author_paths = tuple(f"{path.rstrip('/')}" for path in author_paths)
        """Files and folders that the kernel's author may have written to, wherever they are."""
        self._inspected = {path for path, _ in self._mapped() or ()}
        """Libraries already inspected, and those of the process before any kernel was loaded."""
        self._without_aten: set[str] = set()
        self._readable = self._mapped() is not None

    def rejection_reason(self, forbidden_operators: Iterable[str]) -> str | None:
        """Say which library uses forbidden functions; ``forbidden_operators`` are their names."""
        mapped = self._mapped()
        if mapped is None:
            return "hides which libraries it has loaded" if self._readable else None
        copies = [path for path, begins in mapped if begins and _TORCH_LIBRARY.match(path.rpartition("/")[2])]
        if len({Path(path).name.partition(".")[0] for path in copies}) < len(copies):
            return "has loaded another copy of torch's libraries"
        stems = stems_of(forbidden_operators)
        for path in {path for path, _ in mapped} - self._inspected:
            self._inspected.add(path)
            if self._is_foreign(path) and (problem := self._inspect(path, stems)) is not None:
                return problem
        return None

    def has_separate_torch(self, pid: int) -> bool:
        """Whether a child process runs another program that has loaded torch: it has no traps."""
        parent, child = self._mapped_files(self._pid), self._mapped_files(pid)
        if parent is None or child is None or _arenas(parent) & _arenas(child):
            return False  # a forked process has the traps of this one
        return any(_TORCH_LIBRARY.match(Path(path).name) or self._has_aten(path) for path, *_ in child)

    def _has_aten(self, path: str) -> bool:
        if not self._is_foreign(path) or path in self._without_aten:
            return False
        try:
            defines_aten = any(s.defined for s in symbols(Path(path), ATEN_DEFINITION))
        except (NotALibraryError, ValueError, OSError):
            defines_aten = False
        if not defines_aten:
            self._without_aten.add(path)
        return defines_aten

    def _inspect(self, path: str, stems: frozenset[str]) -> str | None:
        """Inspect a library, or its mapped memory if its file is gone."""
        if not path.endswith(_DELETED_SUFFIX):
            return rejection_reason(Path(path), stems)
        name = Path(path.removesuffix(_DELETED_SUFFIX)).name
        try:
            texts = [match[0] for match in ATEN_FUNCTION.finditer(self._memory_of(path))]
        except OSError:
            return None if path.startswith("/memfd:") else f"has loaded {name}, a library that is no longer there"
        return find_direct_call(name, texts, stems)

    def _memory_of(self, path: str) -> bytes:
        maps = Path(f"/proc/{self._pid}/maps").read_text(errors="replace").splitlines()
        ranges = [line.split(maxsplit=1)[0].split("-") for line in maps if line.endswith(path)]
        with Path(f"/proc/{self._pid}/mem").open("rb", buffering=0) as memory:
            parts = []
            for begin, end in ranges:
                memory.seek(int(begin, 16))
                parts.append(memory.read(min(int(end, 16) - int(begin, 16), _MAX_READ_BYTES)))
        return b"\0".join(parts)

    def _mapped(self) -> list[tuple[str, bool]] | None:
        """Return files with mapped code, and whether the first byte is mapped; None if unknown."""
        files = self._mapped_files(self._pid)
        if files is None:
            return None
        code = {path for path, rights, *_ in files if "x" in rights}
        return [(path, offset == 0) for path, _, offset, _ in files if path in code]

    @staticmethod
    def _mapped_files(pid: int) -> list[tuple[str, str, int, str]] | None:
        """Return path, permissions, offset and identity of the files mapped by a process."""
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            return None
        parts = [line.split(maxsplit=5) for line in lines]
        return [(p[5], p[1], int(p[2], 16), f"{p[3]} {p[4]}") for p in parts if len(p) > 5 and p[5].startswith("/")]

    def _is_foreign(self, path: str) -> bool:
        plain = path.removesuffix(_DELETED_SUFFIX)
        return any(plain == own or plain.startswith(f"{own}/") for own in self._author_paths) or not plain.startswith(
            _SYSTEM_FOLDERS
        )


def _arenas(mapped: list[tuple[str, str, int, str]]) -> set[str]:
    return {identity for path, _, _, identity in mapped if path.startswith(_ARENA_PATH_PREFIX)}
