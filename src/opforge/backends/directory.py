"""A folder of kernels as a backend.

``{op}/{op}_implementation_1.py`` exports ``{op}_kernel_impl``; a ``.cpp`` or ``.cu`` registers it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from opforge.backends.base import BackendOptions
from opforge.errors import NothingToJudgeError, OpforgeError, UnknownNameError
from opforge.kernels import Kernel, ServedOperator, native
from opforge.kernels.source import UNREADABLE, digest, printable, why_unusable, with_resolved_folder
from opforge.ops import SchemaKind, table
from opforge.runtime import untrusted_files

_FILE = "{folder}_implementation_"


class DirectoryBackend:
    """Kernels in a folder, {op}/{op}_implementation_1.py (or .cpp, .cu); the newest of each, unless one is named."""

    name = "directory"

    def __init__(self, options: BackendOptions) -> None:
        self._root = options.ops_directory
        if not self._root.is_dir():
            raise OpforgeError(
                f"there is no kernel directory {str(self._root)!r}; "
                f"make one with `opforge setup --ops-directory {self._root}`, or name another with --ops-directory"
            )
        self._chosen = dict(options.implementations or {})
        self.skipped: list[str] = []
        """Messages about folders without a usable kernel."""
        self.idle: list[Kernel] = []
        """Kernels without a case."""

    def kernels(self, ops: Iterable[str]) -> list[Kernel]:
        served, idle = assign_operators(self._all_kernels(), ops)
        self.idle += idle
        return served

    def _all_kernels(self) -> list[Kernel]:
        """Return every kernel."""
        entries = sorted(p for p in self._root.iterdir() if not p.name.startswith((".", "__")))
        folders = [path for path in entries if untrusted_files.is_folder(path)]
        self.skipped += [
            f"{printable(p.name)} is a link, and links are not followed"
            for p in entries
            if p.is_symlink() and p.is_dir()
        ]
        kernels = [kernel for folder in folders if (kernel := self._kernel(folder)) is not None]
        if unused := set(self._chosen) - {folder.name for folder in folders}:
            raise UnknownNameError("kernel folder", min(unused), [folder.name for folder in folders])
        if not kernels:
            raise NothingToJudgeError(
                f"no kernel in {str(self._root)!r}: expected {{op}}/{{op}}_implementation_1.py"
                + "".join(f"; {reason}" for reason in self.skipped)
            )
        return kernels

    def _kernel(self, folder: Path) -> Kernel | None:
        name = operator_of_folder(folder.name)
        candidates = implementation_files(folder)
        if not candidates:
            name = printable(folder.name)
            self.skipped.append(f"{name} holds no {_FILE.format(folder=name)}*.py, *.cpp or *.cu")
            return None
        file = self._pick(folder, candidates)
        try:
            return kernel_from_file(file, name)
        except UnknownNameError as error:
            self.skipped.append(printable(str(error)))
            return None

    def _pick(self, folder: Path, candidates: list[Path]) -> Path:
        chosen = self._chosen.get(folder.name)
        if chosen is None:
            return candidates[-1]
        prefix = _FILE.format(folder=folder.name)
        by_name = {
            name: f
            for f in candidates
            for name in (f.name, f.stem, *(n.removeprefix(prefix) for n in (f.name, f.stem)))
        }
        if chosen not in by_name:
            raise UnknownNameError(f"implementation of {folder.name}", chosen, by_name)
        return by_name[chosen]


def assign_operators(kernels: Iterable[Kernel], ops: Iterable[str]) -> tuple[list[Kernel], list[Kernel]]:
    """Assign operators to kernels; return kernels with their operators, and kernels without any.

    Kernels that serve fewer operators go first: a folder for one overload or form wins over
    the packet's.
    """
    unassigned = set(ops)
    assigned, idle = [], []
    for kernel in sorted(kernels, key=lambda kernel: len(kernel.serves)):
        serves = tuple(s for s in kernel.serves if s.op in unassigned)
        unassigned -= {s.op for s in serves}
        if not serves:
            idle.append(kernel)
        else:
            assigned.append(replace(kernel, serves=serves))
    return assigned, idle


def kernel_from_file(file: Path, name: str) -> Kernel:
    """Return the kernel in a file, written for the named operator, with all operators it serves."""
    primary = table().resolve(name)
    family, others = table().served_by(name)
    functional = (
        [op for op in family if op.kind is not SchemaKind.MUTABLE]
        if primary.kind is SchemaKind.FUNCTIONAL
        else [primary]
    )
    serves = [ServedOperator(op.name) for op in functional] + [ServedOperator(op.name, required=False) for op in others]
    entries = dict.fromkeys([f"{name.replace('.', '__')}_kernel_impl", f"{primary.base}_kernel_impl"])
    broken, path = why_unusable(file), str(with_resolved_folder(file))
    return Kernel(
        printable(file.stem),
        primary.name,
        tuple(serves),
        printable(path) if broken else path,
        tuple(entries),
        UNREADABLE if broken else digest(file),
        broken=broken,
    )


def operator_of_folder(folder: str) -> str:
    """Return a folder's operator; ``add__Scalar`` and ``add.Scalar`` are the same overload."""
    if folder.startswith("__") or "__" not in folder.rstrip("_"):
        return folder
    base, _, overload = folder.rpartition("__")
    name = f"{base}.{overload}"
    return name if table().get(name) is not None else folder


def implementation_files(folder: Path) -> list[Path]:
    """Return the implementations in a folder, oldest first.

    ``_2`` comes before ``_10``, and C++ before Python of the same number.
    """
    prefix = _FILE.format(folder=folder.name)
    if not untrusted_files.is_folder(folder):
        return []
    suffixes = (".py", *native.SUFFIXES)
    matches = (p for p in folder.iterdir() if p.name.startswith(prefix) and p.suffix in suffixes and not p.is_dir())
    return sorted(matches, key=lambda p: (_natural_sort_key(p.stem), p.suffix))


def _natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"([0-9]+)", text)
    return [(1, int(part), "") if position % 2 else (0, 0, part) for position, part in enumerate(parts)]
