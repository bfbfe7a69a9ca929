"""What a kernel is made of: its file, the modules beside it that it imports, and files there that it names."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from opforge.kernels import native

UNREADABLE = "unreadable"
"""In a digest's place where a source cannot be read."""
_NAME = re.compile(r"(?:(?!\.)[\w.-]+/)*(?!\.)[\w.-]{1,100}", re.ASCII)
"""What may be the name of a file below a folder."""


def digest(file: Path) -> str:
    """Return the digest of a source with what it imports and names from beside it; one that cannot be read has none, and its load is its verdict."""
    try:
        if native.is_native(file):
            return native.digest(file)
        whole = hashlib.sha256(file.read_bytes())
        for other in sorted(beside(file)):
            whole.update(str(other.relative_to(file.parent)).encode() + b"\0" + other.read_bytes())
    except OSError:
        return UNREADABLE
    return whole.hexdigest()[:16]


def imports(text: str) -> Iterator[str]:
    """Yield the first parts of the names of the modules that a source imports; none where it cannot be parsed."""
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _nodes(text: str) -> Iterator[ast.AST]:
    with contextlib.suppress(SyntaxError, ValueError):
        yield from ast.walk(ast.parse(text))


def beside(file: Path) -> set[Path]:
    """Return the files in a file's folder and below that it imports or names, directly or through each other."""
    found: set[Path] = set()
    new = {file}
    while new:
        texts = [source.read_text(encoding="utf-8", errors="replace") for source in new if source.suffix == ".py"]
        there = {path for text in texts for name in imports(text) for path in _module(file.parent, name)}
        there |= {path for text in texts for name in _constants(text) for path in _named(file.parent, name)}
        new = there - found - {file}
        found |= new
    return found


def _module(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module that lies in a folder; none where there is no such module."""
    if (module := folder / f"{name}.py").is_file():
        yield module
    yield from folder.glob(f"{name}.*.so")
    if (package := folder / name).is_dir():
        yield from package.rglob("*.py")


def _constants(text: str) -> Iterator[str]:
    """Yield the texts in a source that may name a file or, for ``import_module``, a module."""
    for node in _nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.value


def _named(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files that a name may stand for: a file, all of a folder, a module; none outside of the folder, and no proofs."""
    place = folder / name
    if place.is_file():
        yield place
    elif place.is_dir() and place != folder:
        yield from (path for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc")
    elif name.replace(".", "").isidentifier():
        yield from _module(folder, name.partition(".")[0])
