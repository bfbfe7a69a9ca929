"""The files of a kernel: its own, and those in its folder that it imports or names."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from opforge.kernels import native
from opforge.runtime import untrusted_files

UNREADABLE = "unreadable"
"""Placeholder for the digest of an unreadable source."""
_NAME = re.compile(r"(?:(?!\.)[\w.-]+/)*(?!\.)[\w.-]{1,100}", re.ASCII)
"""Matches possible names of files below a folder."""


def digest(file: Path) -> str:
    """Return the digest of a source and the files beside it that it imports or names.

    It is UNREADABLE if any of them cannot be read.
    """
    try:
        return _digest(file)
    except OSError:
        return UNREADABLE


def _digest(file: Path) -> str:
    # Of fixed length for the source, so that its end cannot stand for another file. Whole, because two sources with the
    # same short digest can be found: one to be judged, and one to be shipped.
    hasher = hashlib.sha256(hashlib.sha256(untrusted_files.read(file)).digest())
    for other in sorted(dependencies(file)):
        name = os.fsencode(other.relative_to(file.parent))
        hasher.update(name + b"\0" + hashlib.sha256(untrusted_files.read(other)).digest())
    return hasher.hexdigest()


def why_unusable(file: Path) -> str:
    """Return why a file cannot be run as a kernel; empty if it can.

    Such a kernel has no digest: it, or a file it imports or names, cannot be read. Without a digest
    it could no longer be checked against the kernel that was judged.
    """
    if not file.name.isprintable():
        return f"its name, {printable(file.name)}, is not printable UTF-8: rename it"
    try:
        _digest(file)
    except OSError as error:
        return f"{printable(Path(error.filename or file).name)} cannot be read: {error.strerror}"
    return ""


def with_resolved_folder(file: Path) -> Path:
    """Return the path of a file with its folders' links resolved, but not its own."""
    return file.parent.resolve() / file.name


def printable(name: str) -> str:
    """Return a printable form of a name: unprintable characters become their numbers."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def imported_modules(text: str) -> Iterator[str]:
    """Yield the top-level names of a source's imported modules; none if it cannot be parsed."""
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _nodes(text: str) -> Iterator[ast.AST]:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        yield from ast.walk(ast.parse(text))


def dependencies(file: Path) -> set[Path]:
    """Return the files in and below a file's folder that it imports or names, directly or not.

    For C++ these are the headers.
    """
    if native.is_native(file):
        return set(native.headers_in(file.parent))
    reached: set[Path] = set()
    new = {file}
    while new:
        texts = [untrusted_files.read_text(source) for source in new if source.suffix == ".py"]
        referenced = {path for text in texts for name in imported_modules(text) for path in _module(file.parent, name)}
        referenced |= {path for text in texts for name in _possible_names(text) for path in _named(file.parent, name)}
        new = referenced - reached - {file}
        reached |= new
        if len(reached) > untrusted_files.MAX_FILES:
            raise OSError(errno.EFBIG, f"it names more than {untrusted_files.MAX_FILES} files", str(file))
    return reached


def _module(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module in a folder; none if there is no such module."""
    if untrusted_files.is_regular(module := folder / f"{name}.py"):
        yield module
    yield from (path for path in folder.glob(f"{name}.*.so") if untrusted_files.is_regular(path))
    if untrusted_files.is_folder(package := folder / name):
        yield from (path for path in untrusted_files.files_below(package) if path.suffix == ".py")


def _possible_names(text: str) -> Iterator[str]:
    """Yield the strings in a source that may name a file or, for ``import_module``, a module."""
    for node in _nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.value


def _named(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files that a name may refer to: a file, all files of a folder, or a module.

    The folder itself, which holds proofs, and anything outside it are left out.
    """
    path = folder / name
    if untrusted_files.is_regular(path):
        yield path
    elif untrusted_files.is_folder(path) and path != folder:
        yield from untrusted_files.files_below(path)
    elif name.replace(".", "").isidentifier():
        yield from _module(folder, name.partition(".")[0])
